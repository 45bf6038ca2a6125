"""Looking at a run runs no code that its folder names: it may be somebody else's."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AGL = Path(sys.executable).with_name("agl")

PLUGIN = """
from pathlib import Path
import agl_core
from agl_core.store.sqlite import SqliteStore

Path(__file__).with_name("it-ran").touch()

@agl_core.hookimpl
def register_components(register):
    build = lambda options, folder, read_only: SqliteStore(folder / "store.sqlite", read_only=read_only)
    register(agl_core.kinds.STORE, "theirs", build)
"""

LOOKING: tuple[str, ...] = (
    "rollouts RUN",
    "show RUN s1-g0-m0",
    "export RUN --to episodes --out episodes.jsonl",
    "runs list",
    "runs prune RUN",
    "reward try RUN/config.toml",
)


@pytest.fixture
def foreign(run: Any) -> Any:
    """The run, whose configuration names a plugin file in its folder, and a store that this brings."""
    folder = run.folder / "runs" / "calc"
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "checkpoints" / "step-1" / "default" / "model").mkdir(parents=True)
    plugins = ["trial_rules.py", "runs/calc/plugin.py"]
    run.write("runs/calc/config.toml", folder="../..", plugins=plugins, store={"name": "theirs"})
    return run


@pytest.mark.parametrize("command", LOOKING)
def test_no_code_of_the_run_runs(foreign: Any, command: str) -> None:
    foreign.agl(*command.replace("RUN", "runs/calc").split())

    assert not (foreign.folder / "runs" / "calc" / "it-ran").exists()


def test_trying_rewards_asks_first(foreign: Any) -> None:
    foreign.write("runs/calc/config.toml", folder="../..", plugins=["trial_rules.py", "runs/calc/plugin.py"])
    ran = foreign.folder / "runs" / "calc" / "it-ran"
    command = ("reward", "try", "runs/calc/config.toml")

    refused = run_agl(*command, stdin=subprocess.DEVNULL)

    assert refused.returncode == 2
    assert f"of {ran.with_name('plugin.py')}, with your rights" in refused.stderr
    assert "--yes" in refused.stderr
    assert answered("n\n", *command).returncode == 1
    assert not ran.exists()
    assert answered("y\n", *command).returncode == 0
    assert ran.exists()


def run_agl(*arguments: str, stdin: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([AGL, *arguments], stdin=stdin, capture_output=True, text=True, timeout=120, check=False)


def answered(answer: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with a terminal at which somebody types this."""
    terminal, its_end = pty.openpty()
    try:
        os.write(terminal, answer.encode())
        return run_agl(*arguments, stdin=its_end)
    finally:
        os.close(terminal)
        os.close(its_end)
