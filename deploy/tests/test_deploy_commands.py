"""Every command line in deploy/ is one that `agl` takes, and every name in it one that the code knows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import typer

from agl_core.cli import app
from agl_core.config.check import cautions, check
from agl_core.config.load import load

from .deployed import CONFIGS, DEPLOY, ROOT, CommandLine, command_lines, container, kustomization, pod_templates

COMMANDS = list(command_lines())
CALC = ROOT / "examples" / "calc"
OTHERS = {
    "HOME": "whoever keeps files there",
    "HF_HOME": "huggingface_hub's folder of downloaded models",
    "RAY_JOB_STOP_WAIT_TIME_S": "ray/dashboard/modules/job/job_supervisor.py",
}
"""Environment variables in pods that are not agl's, and who reads them."""


def parse(words: tuple[str, ...]) -> None:
    """As typed, without running it; a usage error says what is wrong."""
    whole = typer.main.get_command(app)
    with whole.make_context("agl", list(words)) as context:
        name, command, rest = whole.resolve_command(context, [*context._protected_args, *context.args])
        with command.make_context(name, rest, parent=context):
            pass


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: f"{line.place}:{line.words[0]}")
def test_command_lines_are_parsed(line: CommandLine) -> None:
    parse(line.words)


@pytest.mark.parametrize(
    "line", [line for line in COMMANDS if line.settings], ids=lambda line: f"{line.place}:{line.words[0]}"
)
def test_settings_are_those_of_a_configuration(line: CommandLine) -> None:
    settings = [f"folder={CALC}" if each.startswith("folder=") else each for each in line.settings]
    load(DEPLOY / "configs" / "64-gpus.toml", settings)


def test_every_place_is_looked_at() -> None:
    found = {(line.place, line.words[0]) for line in COMMANDS}
    assert {
        ("server", "serve"), ("worker", "worker"), ("rayjob.yaml", "train"), ("train.sbatch", "serve"),
        ("train.sbatch", "worker"), ("train.sbatch", "train"), ("train-or-resume", "train"), ("README.md", "train"),
        ("1-gpu.toml", "train"), ("8-gpus.toml", "train"),
    } <= found  # fmt: skip


@pytest.mark.parametrize(
    "words", [("train", "1", "--sever", "1"), ("serf", "1"), ("serve",), ("serve", "1", "--port", "x")]
)
def test_a_wrong_command_line_is_noticed(words: tuple[str, ...]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing|valid integer"):
        parse(words)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: each.stem)
def test_configurations_go_together(config: Path) -> None:
    loaded = load(config)
    check(loaded)
    assert list(cautions(loaded)) == []
    options = loaded.config.engine.settings
    assert options["nodes"] * options["gpus_per_node"] == int(config.stem.partition("-")[0])


def test_environment_variables_are_read_by_somebody() -> None:
    code = "\n".join(
        file.read_text() for top in ("core", "algorithms") for file in (ROOT / top).glob("**/agl_*/**/*.py")
    )
    files = [file for file in DEPLOY.rglob("*") if file.is_file() and file.suffix in ("", ".md", ".sbatch", ".yaml")]
    texts = [file.read_text() for file in files]
    named = {name for text in texts for name in re.findall(r"\bAGL_[A-Z_]+\b", text)}
    assert len(named) >= 2
    for name in named:
        assert f'"{name}"' in code, name
    in_pods = {each["name"] for template in pod_templates().values() for each in container(template).get("env", [])}
    assert in_pods - named == OTHERS.keys()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The server's container's command in a process here, with this machine's paths and its own address."""
    words = container(pod_templates()["server"])["args"]
    [file] = kustomization()["configMapGenerator"][0]["files"]
    here = {
        "agl": str(Path(sys.executable).with_name("agl")),
        "/etc/agl/train.toml": str(DEPLOY / file.partition("=")[2]),
        "--host=0.0.0.0": "--host=127.0.0.1",
        "--port=8123": "--port=0",
        "--set=runs=/var/lib/agl/runs": f"--set=runs={tmp_path}/runs",
        "--set=folder=/opt/agent": f"--set=folder={CALC}",
    }
    assert {word for word in words if word not in here} == {"serve"}
    keys = {"AGL_WORKER_KEY": "w" * 24, "AGL_OPERATOR_KEY": "o" * 24, "PYTHONUNBUFFERED": "1", "COLUMNS": "300"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [here.get(word, word) for word in words],
            cwd=tmp_path, env={**os.environ, **keys}, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while (found := re.search(r"serving \S+ at (\S+)", (tmp_path / "log").read_text())) is None:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "it ends by itself within the pod's grace period"
    finally:
        process.kill()
        process.wait()


def test_the_servers_command_starts_a_server_that_its_probes_find_well(served: str) -> None:
    probed = container(pod_templates()["server"])
    paths = {probed[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    for path in paths:
        assert httpx.get(served + path, trust_env=False).status_code == 200, "a kubelet has no key"
    health = httpx.get(f"{served}/agl/v1/health", headers={"Authorization": "Bearer " + "w" * 24}, trust_env=False)
    assert health.json()["run"] == "calc-64"
