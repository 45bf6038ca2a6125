"""Every command line in deploy/ is one that `agl` takes, and every name in it one that the code knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from agl_core.cli import app
from agl_core.config.check import cautions
from agl_core.config.load import load

from .deployed import CONFIGS, DEPLOY, ROOT, CommandLine, command_lines, container, pod_templates

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


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: f"{line.source}:{line.words[0]}")
def test_command_lines_are_parsed(line: CommandLine) -> None:
    parse(line.words)


@pytest.mark.parametrize(
    "line", [line for line in COMMANDS if line.settings], ids=lambda line: f"{line.source}:{line.words[0]}"
)
def test_settings_are_those_of_a_configuration(line: CommandLine) -> None:
    settings = [f"folder={CALC}" if s.startswith("folder=") else s for s in line.settings]
    load(DEPLOY / "configs" / "64-gpus.toml", settings)


def test_every_place_is_looked_at() -> None:
    tested = {(line.source, line.words[0]) for line in COMMANDS}
    assert {
        ("worker", "worker"), ("rayjob.yaml", "train"), ("train.sbatch", "worker"), ("train.sbatch", "train"),
        ("train-or-resume", "train"), ("README.md", "train"), ("1-gpu.toml", "train"), ("8-gpus.toml", "train"),
    } <= tested  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda file: file.stem)
def test_configurations_go_together(config: Path) -> None:
    loaded = load(config)
    assert list(cautions(loaded)) == []
    options = loaded.config.engine.settings["verl"]
    assert options["nodes"] * options["gpus_per_node"] == int(config.stem.partition("-")[0])


def test_environment_variables_are_read_by_somebody() -> None:
    code = "\n".join(
        file.read_text() for top in ("core", "algorithms") for file in (ROOT / top).glob("**/agl_*/**/*.py")
    )
    files = [file for file in DEPLOY.rglob("*") if file.is_file() and file.suffix in ("", ".md", ".sbatch", ".yaml")]
    texts = [file.read_text() for file in files]
    named = {name for text in texts for name in re.findall(r"\bAGL_[A-Z_]+\b", text)}
    assert "AGL_WORKER_KEY" in named
    for name in named:
        assert f'"{name}"' in code, name
    in_pods = {e["name"] for template in pod_templates().values() for e in container(template).get("env", [])}
    assert in_pods - named == OTHERS.keys()
