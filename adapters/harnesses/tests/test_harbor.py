"""Task folders after Harbor's public format are read, solved in a real sandbox, and graded by their own tests."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from agl_core.config.models import UntrainedConfig
from agl_core.errors import ConfigError
from agl_core.kinds import REWARD, TASK_SOURCE
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.types import Reward, Task
from agl_harnesses.workspace import Workspaces, WorkspaceSection, task_source

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="the package bubblewrap is missing")

COUNT = """#!/bin/bash
cd /app && [ "$(cat /tests/expected)" = "$($COUNTER words.txt)" ] && r=1 || r=0
echo $r > /logs/verifier/reward.txt
sleep 0.2
"""
DOCKERFILE = """# Files alone.
FROM debian:12-slim AS base
WORKDIR /app
ENV LANG=C A="b c"
COPY --chown=0:0 \\
  words.txt data/*.md ./
COPY data more/
CMD ["bash"]
"""
TASK = {
    "task.toml": '[metadata]\nkind = "text"\n[verifier]\ntimeout_sec = 60.0\nenv = { COUNTER = "sh count.sh" }\n',
    "instruction.md": "<!-- canary 1 -->\n\nWrite count.sh, which counts the words of a file, to /app.\n",
    "environment/Dockerfile": DOCKERFILE,
    "environment/words.txt": "one two three\n",
    "environment/data/a.md": "A\n",
    "tests/test.sh": COUNT,
    "tests/expected": "3\n",
    "solution/solve.sh": "echo 'wc -w < $1' > /app/count.sh\n",
}


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def read(path: Path, *installed: str) -> list[Task]:
    component = Plugins.load().component(TASK_SOURCE, "harbor", "the test")
    tasks = component.build(component.options(path=path, installed=installed), path, 0)
    return [tasks.task(index) for index in range(tasks.size)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


async def graded(folder: Path, task: Task, files: Mapping[str, str]) -> Reward:
    """The reward of an attempt that wrote these files."""
    workspace = Workspaces(WorkspaceSection(), folder).create(task_source(task.input), folder / "attempt")
    write(workspace.path, files)
    component = Plugins.load().component(REWARD, "harbor", "the test")
    rule = component.build(component.options(), None)
    [reward] = await rule(make.episode(result={"text": "", "diff": workspace.diff()}, task=task))
    shutil.rmtree(folder / "attempt")
    return reward


async def test_a_task_is_solved_by_its_solution_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "tasks" / "count", TASK)
    [task] = read(tmp_path / "tasks")
    assert (task.id, task.input["prompt"]) == ("count", "Write count.sh, which counts the words of a file, to /app.\n")
    source = task_source(task.input)
    assert source is not None
    assert (source.mount, source.variables) == ("/app", {"LANG": "C", "A": "b c"})
    workspace = Workspaces(WorkspaceSection(), tmp_path).create(source, tmp_path / "seen")
    paths = {str(path.relative_to(workspace.path)) for path in workspace.path.rglob("*") if path.is_file()}
    assert paths == {"words.txt", "a.md", "more/a.md"}
    solution = (folder / "solution" / "solve.sh").read_text().replace("/app", str(workspace.path))
    await asyncio.to_thread(subprocess.run, ["sh", "-c", solution], check=True)
    solved = await graded(tmp_path, task, {"count.sh": (workspace.path / "count.sh").read_text()})
    assert (solved.value, solved.name) == (1.0, "harbor")
    assert str(solved.evidence).startswith("tests/test.sh reported 1. ")
    planted = {"reward.json": "1", "logs/verifier/reward.txt": "1", "tests/expected": "", "conftest.py": "1"}
    assert (await graded(tmp_path, task, planted)).value == 0.0


LATER = "until grep -q 0 /logs/verifier/reward.txt; do :; done; echo 1 > /logs/verifier/reward.txt"
ATTACKS = {
    "the tests are changed": "echo 2 > /tests/expected; echo 'echo 1 > /logs/verifier/reward.txt' >> /tests/test.sh",
    "a second report": "echo 1 > /logs/verifier/reward.json",
    "a report that is a link": "ln -s {one} /logs/verifier/reward.txt",
    "a report that blocks": "mkfifo /logs/verifier/reward.json",
    "a process that writes later": "(while :; do echo 1 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 &",
    "a process that writes later and ends": f"(setsid sh -c '{LATER}' &) > /dev/null 2>&1",
    "an end of the tests": "echo 1 > /logs/verifier/reward.txt; kill -TERM -1",
    "a report that cannot be written": "echo 1 > /logs/verifier/reward.txt; chmod 444 /logs/verifier/reward.txt",
    "a report elsewhere": "mv /logs /tmp/x || mv /logs /x; mkdir -p /logs/verifier; echo 1 > /x/verifier/reward.txt",
    "an endless loop": "echo 1 > /logs/verifier/reward.txt; while :; do :; done",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
async def test_no_other_way_than_a_solution_is_paid(attack: str, tmp_path: Path) -> None:
    short = TASK["task.toml"].replace("60.0", "2.0")
    [task] = read(write(tmp_path / "count", {**TASK, "task.toml": short}))
    (tmp_path / "one").write_text("1")
    attempt = {"count.sh": attack.replace("{one}", str(tmp_path / "one")) + "\necho 2\n"}
    assert (await graded(tmp_path, task, attempt)).value == 0.0


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ("json <<< '{\"pass\": 0.5}'", 0.5),
        ("json <<< 0.25", 0.25),
        ("txt <<< ' 0.75 '", 0.75),
        ("txt <<< 1; echo 1 > /logs/verifier/reward.json", 1.0),
        ("txt <<< nan", 0.0),
        ("json <<< '{\"reward\": Infinity}'", 0.0),
        ("json <<< 1e999", 0.0),
        ('json <<< \'{"reward": "1"}\'', 0.0),
        ('json <<< \'{"a": 1, "b": 1}\'', 0.0),
        ("json <<< '{\"reward\": true}'", 0.0),
        ('json <<< \'{"seconds": 1, "error": "crashed"}\'', 0.0),
        ("txt <<< 1.5", 0.0),
        ("txt <<< 0_1", 0.0),
        ("txt <<< -1", 0.0),
        ("txt < /dev/null", 0.0),
        ("no <<< 1", 0.0),
    ],
)
async def test_a_report_is_one_number(report: str, expected: float, tmp_path: Path) -> None:
    script = f"cat > /logs/verifier/reward.{report}\n"
    [task] = read(write(tmp_path / "count", {**TASK, "tests/test.sh": script}))
    reward = await graded(tmp_path, task, {})
    assert reward.value == expected
    assert ("There is no valid report" in str(reward.evidence)) == (expected == 0)


UNSUPPORTED = {
    "run": ("environment/Dockerfile", "FROM debian\nRUN make\n", "its Dockerfile has `RUN make`"),
    "image": ("environment/Dockerfile", "FROM nvidia/cuda:12\n", "it needs the image nvidia/cuda:12"),
    "stages": ("environment/Dockerfile", "FROM debian\nFROM debian\n", "has `FROM debian`"),
    "remote": ("environment/Dockerfile", "FROM debian\nADD https://a.example/b /app/b\n", "has `ADD https"),
    "outside": ("environment/Dockerfile", "FROM debian\nWORKDIR /app\nCOPY words.txt /data/\n", "it names /data/"),
    "missing": ("environment/Dockerfile", "FROM debian\nWORKDIR /app\nCOPY ../x .\n", "copies ../x, which is not"),
    "system": ("environment/Dockerfile", "FROM debian\nWORKDIR /usr/lib\n", "workspace at '/usr/lib'"),
    "expansion": ("environment/Dockerfile", "FROM debian\nENV A=$B\n", "variables refer to others"),
    "compose": ("environment/docker-compose.yaml", "", "it has environment/docker-compose.yaml"),
    "gpu": ("task.toml", "[environment]\ngpus = 1\n", "its task.toml has `environment.gpus`"),
    "separate": ("task.toml", "[verifier]\nenvironment_mode = 'separate'\n", "has `verifier.environment_mode`"),
    "installs": ("tests/test.sh", "set -e\napt-get install -y jq # for JSON\n", "test.sh has `apt-get install -y jq"),
    "tee": ("tests/test.sh", "exec > >(tee /logs/verifier/log)\n", "test.sh has `exec > >(tee"),
    "toml": ("task.toml", "a =", "Invalid value (at end of document)"),
    "time": ("task.toml", "[verifier]\ntimeout_sec = 'x'\n", "verifier.timeout_sec Input should be a valid number"),
    "no table": ("task.toml", "environment = 'x'\n", "has no attribute"),
    "a variable": ("task.toml", "[environment]\nenv = { 'A=B' = 'c' }\n", "environment.env.A=B"),
    "packages": ("environment/Dockerfile", "FROM debian\nRUN apt-get install -y jq\n", "installs jq, not named in"),
    "download": (
        "environment/Dockerfile",
        "FROM debian\nRUN mkdir -p /app && curl a.b\n",
        "has `RUN mkdir -p /app && c",
    ),
    "scratch": ("instruction.md", "Write /tmp/a.txt.\n", "it names /tmp/a.txt"),
    "elsewhere": ("instruction.md", "Write /output/a.txt, and/or /app/b.\n", "it names /output/a.txt, outside"),
}


def test_tasks_that_need_an_image_are_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, (path, text, _) in UNSUPPORTED.items():
        write(tmp_path / "tasks" / name, {**TASK, path: text})
    with pytest.raises(ConfigError, match=r"no task in .* without an image"):
        read(tmp_path / "tasks")
    write(tmp_path / "tasks" / "count", TASK)
    prebuilt = "[environment]\ndocker_image = 'python:3.13-slim'\nworkdir = '/app'\nos = 'linux'\n"
    write(tmp_path / "tasks" / "prebuilt", {**TASK, "task.toml": prebuilt})
    (tmp_path / "tasks" / "prebuilt" / "environment" / "Dockerfile").unlink()
    with caplog.at_level(logging.WARNING):
        assert [task.id for task in read(tmp_path / "tasks")] == ["count", "prebuilt"]
    [message] = caplog.messages
    assert message.startswith(f"{len(UNSUPPORTED)} of {len(UNSUPPORTED) + 2} tasks")
    for name, (_, _, words) in UNSUPPORTED.items():
        [line] = [line for line in message.splitlines() if line.startswith(f"  {name}: ")]
        assert words in line


INSTALLS = """FROM registry.example/docker/library/python:3.13-slim@sha256:0a1b
RUN apt-get update && \\
  apt-get install -y --no-install-recommends python3-pip && ln -s /usr/bin/python3 /usr/bin/python && \\
  rm -rf /var/lib/apt/lists/*
RUN pip3 install --no-cache-dir 'pytest>=8' pandas==2.3.2
WORKDIR /app
RUN mkdir -p /app/in /app/out
COPY words.txt in/
"""


def test_an_image_may_install_what_the_machine_has(tmp_path: Path) -> None:
    folder = write(tmp_path / "tasks" / "count", {**TASK, "environment/Dockerfile": INSTALLS})
    with pytest.raises(ConfigError, match="its Dockerfile installs pandas, not named in `installed`"):
        read(tmp_path / "tasks", "python3-pip", "pytest")
    tbench = INSTALLS.replace("registry.example/docker/library/python:", "registry.example/t-bench/python-3-13:")
    for dockerfile in (INSTALLS, tbench):
        write(folder, {"environment/Dockerfile": dockerfile})
        [task] = read(tmp_path / "tasks", "python3-pip", "pytest", "pandas")
        source = task_source(task.input)
        assert source is not None
        workspace = Workspaces(WorkspaceSection(), tmp_path).create(source, tmp_path / "seen")
        assert {str(path.relative_to(workspace.path)) for path in workspace.path.rglob("*")} >= {"in/words.txt", "out"}
        shutil.rmtree(workspace.path)


def test_a_folder_without_harbor_tasks_is_told_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"needs a task\.toml in .*none or in folders of it: fix `path`"):
        read(tmp_path / "none")
    write(tmp_path / "first", {"a/task.yaml": "instruction: x\n", "a/run-tests.sh": "", "a/docker-compose.yaml": ""})
    with pytest.raises(ConfigError, match=r"`harbor task migrate` converts Terminal-Bench 1's task\.yaml"):
        read(tmp_path / "first")


def test_a_task_writes_nothing_outside_of_its_own_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copies = "FROM debian\nWORKDIR /app\nCOPY d/ ./\nCOPY words.txt out/\n"
    folder = write(tmp_path / "tasks" / "link", {**TASK, "environment/Dockerfile": copies, "environment/d/a": ""})
    write(tmp_path / "tasks" / "count", TASK)
    (tmp_path / "outside").mkdir()
    (folder / "environment" / "d" / "out").symlink_to(tmp_path / "outside")
    with caplog.at_level(logging.WARNING):
        assert [task.id for task in read(tmp_path / "tasks")] == ["count"]
    assert "the link out in environment/ leads out of it" in caplog.text
    assert not [*(tmp_path / "outside").iterdir()]


async def test_a_task_of_another_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'t' has no tests for 'harbor'"):
        await graded(tmp_path, Task("t", {"prompt": "x"}), {})


async def test_the_plain_runner_is_refused(tmp_path: Path) -> None:
    [task] = read(write(tmp_path / "count", TASK))
    component = Plugins.load().component(REWARD, "harbor", "the test")
    config = UntrainedConfig.model_validate({"config_version": 1, "workspace": {"runner": "plain"}})
    rule = component.build(component.options(), config)
    with pytest.raises(ConfigError, match="has to be at /app"):
        await rule(make.episode(result={"diff": ""}, task=task))
