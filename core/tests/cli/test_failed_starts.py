"""A start that fails says why in a sentence, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from agl_command import Agl, agl_in_process  # noqa: F401

from agl_core.cli import SERVER_MODULES
from agl_core.wire.keys import OPERATOR_KEY, WORKER_KEY

READ_ONLY = 'mount --bind . . && mount -o remount,bind,ro . && cd .. && cd mine && exec "$@"'
"""For root, whom permissions do not stop: a shell command in a mount namespace of its own."""
PLUGIN = """
import agl_core
from agl_core.protocols import Engine

class Broken(Engine):
    def __init__(self, log):
        self._log = log

    async def start(self):
        if self._log is not None:
            self._log.write_text("what the engine had to say")
        raise agl_core.errors.EngineError("The engine cannot start: it is broken.")

    async def stop(self): ...

    update = save = load = versions = stats = None

@agl_core.hookimpl
def register_components(register):
    provided = {agl_core.Capability.TOKEN_IDS}
    for name, log in (("broken", None), ("telling", "engine.log")):
        build = lambda options, context, log=log: Broken(log and context.run_dir / log)
        register(agl_core.kinds.ENGINE, name, build, provides=provided)
    register(agl_core.kinds.ALGORITHM, "plain", lambda options: None)
"""

CONFIG: dict[str, Any] = {
    "config_version": 1,
    "name": "mine",
    "plugins": ["broken.py"],
    "agent": {"entry": "an_agent:solve", "attach": False},
    "tasks": {"train": {"source": "jsonl", "path": "tasks.jsonl"}},
    "policies": {"default": {"model": {"path": "weights"}}},
    "algorithm": {"name": "plain"},
    "engine": {"name": "broken"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    (tmp_path / "broken.py").write_text(PLUGIN)
    (tmp_path / "tasks.jsonl").write_text('{"input": 1}\n')
    (tmp_path / "an_agent.py").write_text("def solve(task):\n    return 1.0\n")
    (tmp_path / "train.toml").write_text(tomli_w.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def refused(folder: Path, agl: Agl, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command that fails, and returns what it says."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # So that what the agent's import adds to the path goes with it.
    for name in (WORKER_KEY, OPERATOR_KEY):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> str:
        ended = agl(*arguments)
        assert ended.returncode == 2
        return ended.stderr

    return run


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["train", "train.toml", "--set=agent.entry=no_agent:solve"], "'no_agent' cannot be imported"),
        (["train", "train.toml"], "it is broken"),
        (["eval", "train.toml"], "it is broken"),
        (["run", "--config", "train.toml", "--", sys.executable, "-c", ""], "it is broken"),
    ],
    ids=["an agent", "an engine", "eval", "run"],
)
def test_no_folder_is_left_behind(refused: Callable[..., str], folder: Path, command: list[str], told: str) -> None:
    assert told in refused(*command)
    assert list((folder / "runs").iterdir()) == []


def test_what_an_engine_said_stays(refused: Callable[..., str], folder: Path) -> None:
    refused("train", "train.toml", "--set=engine.name=telling")
    assert (folder / "runs" / "mine" / "engine.log").read_text() == "what the engine had to say"

    refused("train", "train.toml", "--set=engine.name=telling")
    assert [path.name for path in (folder / "runs").iterdir()] == ["mine"], "a failed start does not keep its name"


@pytest.mark.parametrize("command", [["train", "train.toml"], ["run", "--config", "train.toml", "--", "true"]])
def test_a_folder_that_cannot_be_made_is_named(refused: Callable[..., str], folder: Path, command: list[str]) -> None:
    (folder / "runs").write_text("a file")
    said = refused(*command)
    assert "The run's folder" in said
    assert "cannot be made or written (Not a directory: " in said
    assert "--set runs=FOLDER" in said


def test_a_read_only_run_is_not_resumed(folder: Path) -> None:
    """Before anything opens a file in it, a tracker for instance."""
    run = folder / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(tomli_w.dumps({**CONFIG, "folder": str(folder), "runs": str(folder / "runs")}))
    run.chmod(0o500)
    command = [sys.executable, "-c", "from agl_core.cli import main; main()", "train", "--resume", str(run)]
    if os.geteuid() == 0:
        command = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", *command]
    done = subprocess.run(command, cwd=run, capture_output=True, text=True, timeout=120)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this root may not mount")
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0), done.stderr
    assert f"Error: The run's folder {run} cannot be written, so that the run cannot go on." in done.stderr


def test_run_without_the_servers_packages_makes_no_folder(folder: Path) -> None:
    absent = f"import sys; sys.modules.update(dict.fromkeys({SERVER_MODULES})); from agl_core.cli import main; main()"
    command = [sys.executable, "-c", absent, "run", "--upstream", "http://127.0.0.1:9/v1", "--", "true"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0)
    assert "pip install 'agl-core[server]'" in done.stderr
    assert not (folder / "runs").exists()


def test_a_file_with_the_name_of_a_standard_module_does_no_harm(folder: Path) -> None:
    for name in ("glob", "queue", "types", "logging"):
        (folder / f"{name}.py").write_text("raise RuntimeError('imported instead of the standard module')")
    command = [str(Path(sys.executable).with_name("agl")), "train", "train.toml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert "it is broken" in done.stderr  # The engine, which is the last to be started.
    assert "imported instead" not in done.stdout + done.stderr
