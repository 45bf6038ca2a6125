"""How commands print: the terminal wraps, a pipe gets whole lines, and programs get JSON."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agl_core.cli import app
from agl_core.types import Mode, Reward

LONG = "why " * 60


def piped(*arguments: str) -> str:
    """A command's output where nothing says how wide it is."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def on_a_terminal(code: str, folder: Path, *arguments: str, width: int = 80) -> list[str]:
    """The lines that Python code leaves on a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    unset = ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    environment = {**{name: value for name, value in os.environ.items() if name not in unset}, "TERM": "xterm"}
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = b""
    with contextlib.suppress(OSError):  # So it ends when the other end is closed.
        while piece := os.read(ours, 65536):
            output += piece
    os.close(ours)
    assert process.wait(60) == 0, output
    assert b"Traceback" not in output
    return screen_lines(output.decode())


def screen_lines(written: str) -> list[str]:
    """The lines that stay: one that is erased, or gone up over and erased, is gone."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1] or 1)
        elif part[0] not in "\x1b\r":
            lines[row] += part
    return [line.rstrip() for line in lines]


def with_input(records: list[Any], input: Any) -> list[Any]:
    first, *rest = records
    return [replace(first, task=replace(first.task, input=input)), *rest]


def test_a_rollout_has_one_line_which_a_terminal_crops_and_a_pipe_does_not(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "s7-eval_templates-sampled-g100-m0"
    long = replace(run.trained(7, "m0")[0], id=name, mode=Mode.EVAL_SAMPLED)
    run.put(*with_input([long], LONG), Reward(name, 0, "right", 0.25, "right"))

    lines = on_a_terminal("from agl_core.cli import main; main()", run.folder, "rollouts", "runs/calc")

    assert max(len(line) for line in lines) <= 80
    [line] = [line for line in lines if line.startswith(name)]
    assert line.split()[1:4] == ["right", "0.25", "eval-sampled"]
    monkeypatch.delenv("COLUMNS", raising=False)
    [line] = [line for line in piped("rollouts", "runs/calc").splitlines() if name in line]
    assert json.dumps(LONG) in line


OBSERVED = """
from agl_core.cli.screen import ConsoleObserver, Screen

observer = ConsoleObserver(Screen(), 40)
observer.say("a path that is not broken: " + "/somewhere" * 10)
for step in (1, 2):
    with observer.phase("evaluation eval_templates sampled", step) as phase:
        phase.advance(0.5, "reward 0.123")
    observer.say(f"step {step}")
"""


def test_on_a_terminal_bars_go_and_what_the_run_says_stays(tmp_path: Path) -> None:
    path = "a path that is not broken: " + "/somewhere" * 10

    assert on_a_terminal(OBSERVED, tmp_path) == [path, "step 1", "step 2", ""]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-c", OBSERVED]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment)
    assert printed.stdout.splitlines() == [path, "step 1", "step 2"], "in a pipe too"


def test_reading_commands_print_what_they_found_as_json(run: Any) -> None:
    listed = json.loads(piped("rollouts", "runs/calc", "--limit=1", "--json"))
    filters = ["--tool=look", "--tool-status=error", "--min-reward=0", "--text=42", "--policy=default"]
    filtered = json.loads(piped("rollouts", "runs/calc", *filters, "--json"))
    none = [json.loads(piped("rollouts", "runs/calc", f"--{option}=nope", "--json")) for option in ("agent", "dropped")]
    shown = json.loads(piped("show", "runs/calc", "s1-g0-m0", "--json"))
    tried = json.loads(piped("reward", "try", "--yes", "train.toml", "--set=rewards.right.bonus=2.0", "--json"))
    components = json.loads(piped("plugins", "--json"))

    assert [(rollout["id"], rollout["ending"], rollout["superseded"]) for rollout in listed] == [
        ("s1-g0-m2", "finished", False)
    ]
    assert "s1-g0-m2" in [rollout["id"] for rollout in filtered]
    assert none == [[], []]
    assert {reward["name"]: reward["value"] for reward in listed[0]["rewards"]} == {"right": 1.0, "look": -0.25}
    [attempt] = shown["attempts"]
    assert (shown["rollout"]["counted_attempt"], attempt["attempt"]["result"]) == (0, "42")
    assert attempt["episode"]["transitions"][1]["prompt_ids"] == [1, 2, 3, 4]
    assert [use["credit"] for use in attempt["training_records"]] == [1.25, 1.25]
    assert [group["credit"]["s1-g0-m1"] for group in shown["groups"]] == [[-0.25, -0.25]]
    assert [rollout["terminal"]["after"] for rollout in tried["rollouts"]] == [3.0, 2.0, 3.0]
    assert tried["mean_reward"] == {"before": 2 / 3, "after": 8 / 3, "changed": True}
    assert ("credit", "identical") in [(component["kind"], component["name"]) for component in components]


def test_json_is_strict_and_nothing_that_a_terminal_obeys(run: Any) -> None:
    hostile = "\x1b[31m\x9b31m\ud800"
    run.put(*with_input(run.trained(7, "m0"), hostile), Reward("s7-g0-m0", 0, "right", float("nan"), "right"))

    printed = piped("rollouts", "runs/calc", "--limit=1", "--json")

    assert [c for c in printed if not c.isprintable() and c != "\n"] == []
    [rollout] = json.loads(printed, parse_constant=pytest.fail)
    assert rollout["task"]["input"] == hostile
    assert "nan" in [reward["value"] for reward in rollout["rewards"]]
