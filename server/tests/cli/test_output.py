"""The command line: output on a terminal, in a pipe and as JSON, errors and exit codes, and commands of plugins."""

from __future__ import annotations

import asyncio
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
from agl_command import Agl
from typer.testing import CliRunner

import agl_core
from agl_core.cli import app
from agl_core.errors import StoreError
from agl_core.types import Mode, Reward
from agl_server.reading.rollouts import Query, list_rollouts

LONG = "why " * 60


def piped(*arguments: str) -> str:
    """A command's output where nothing says how wide it is."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def on_a_terminal(code: str, folder: Path, *arguments: str) -> list[str]:
    """The lines that Python code leaves on a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
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
    rollout, attempt, *_ = run.trained(7, "m0")
    records = [replace(rollout, id=name, mode=Mode.EVAL_SAMPLED), replace(attempt, rollout=name)]
    run.put(*with_input(records, LONG), Reward(name, 0, "right", 0.25, "right"))

    lines = on_a_terminal("from agl_core.cli import main; main()", run.folder, "rollouts", "runs/calc")

    assert max(len(line) for line in lines) <= 80
    [line] = [line for line in lines if line.startswith(name)]
    assert line.split()[1:4] == ["right", "0.25", "eval-sampled"]
    monkeypatch.delenv("COLUMNS", raising=False)
    [line] = [line for line in piped("rollouts", "runs/calc").splitlines() if name in line]
    assert json.dumps(LONG) in line


OBSERVED = """
from agl_core.cli.screen import Screen
from agl_server.commands.screen import ConsoleObserver

observer = ConsoleObserver(Screen(), 40)
observer.say("a path that is not broken: " + "/somewhere" * 10)
for step in (1, 2):
    with observer.phase("evaluation eval_templates sampled", step) as advance:
        advance(0.5, "reward 0.123")
    observer.say(f"step {step}")
"""


def test_on_a_terminal_bars_go_and_what_the_run_says_stays(tmp_path: Path) -> None:
    path = "a path that is not broken: " + "/somewhere" * 10

    assert on_a_terminal(OBSERVED, tmp_path) == [path, "step 1", "step 2", ""]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-c", OBSERVED]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment)
    assert printed.stdout.splitlines() == [path, "step 1", "step 2"], "in a pipe too"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "There is no command 'trian'. Did you mean 'train'? Known: "),
        (["runs", "lst"], "Did you mean 'list'?"),
        (["train", "train.toml", "--from", "typo.jsonl"], "typo.jsonl is not a run's folder, nor is there such a file"),
    ],
)
def test_what_is_mistyped_is_named(run: Any, arguments: list[str], says: str) -> None:
    mistyped = CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments)
    assert says in f"{mistyped.output}{mistyped.exception}"


def test_reading_commands_print_what_they_found_as_json(run: Any) -> None:
    listed = json.loads(piped("rollouts", "runs/calc", "--limit=1", "--json"))
    filters = ["--tool=look", "--tool-status=error", "--min-reward=0", "--text=42", "--verdict=unhealthy"]
    filtered = json.loads(piped("rollouts", "runs/calc", *filters, "--json"))
    none = [json.loads(piped("rollouts", "runs/calc", f"--{option}=nope", "--json")) for option in ("agent", "dropped")]
    shown = json.loads(piped("show", "runs/calc", "s1-g0-m0", "--json"))
    tried = json.loads(piped("reward", "try", "--yes", "train.toml", "--set=rewards.right.bonus=2.0", "--json"))
    components = json.loads(piped("plugins", "--json"))

    assert [(rollout["id"], rollout["ending"], rollout["superseded"]) for rollout in listed] == [
        ("s1-g0-m2", "finished", False)
    ]
    assert "s1-g0-m2" in [rollout["id"] for rollout in filtered]
    run.put(*run.trained(2, "m0"), *run.trained(2, "m1"))
    texts = ["6 * 7", "LOOK({", 'look({"', "42", "4 2", "nowhere", "é", "None", "7"]
    every = asyncio.run(list_rollouts(run.store.parent, Query(), 99))
    for text in texts:
        wanted = [report.entry.rollout.id for report in every if Query(text=text).takes_calls(report)]
        found = json.loads(piped("rollouts", "runs/calc", f"--text={text}", "--json"))
        assert [rollout["id"] for rollout in found] == wanted, f"{text}: what the store leaves out has it nowhere"
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


# `agl plugins`, errors, exit codes, and commands that plugins bring.


PLUGIN = '''
import agl_core
from pydantic import BaseModel

@agl_core.reward_rule
def shortness(episode, *, limit: int = 20, unit: str):
    """1 if the answer is short."""

class Options(BaseModel):
    model: str

@agl_core.hookimpl
def register_components(register):
    needs = lambda options: {agl_core.Capability.CRITIC} if options.model else ()
    register(agl_core.kinds.REWARD, "torn", print, options=Options, needs=needs)
'''


def test_plugins_lists_what_the_core_and_a_users_file_bring(
    agl: Agl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)

    result = agl("plugins", "mine.py", "--json")

    listed = {(row["kind"], row["name"]): row for row in json.loads(result.stdout)}
    assert {("store", "sqlite"), ("task source", "jsonl"), ("credit", "identical")} <= set(listed)
    assert listed["credit", "identical"]["yields"] == ["return"]
    assert listed["store", "sqlite"]["origin"].startswith("agl-server ")
    mine = listed["reward", "shortness"]
    assert (mine["origin"], mine["doc"], mine["needs"]) == ("mine.py", "1 if the answer is short.", [])
    assert listed["reward", "torn"]["needs"] is None
    assert mine["settings"] == [
        {"name": "limit", "required": False, "default": 20, "description": ""},
        {"name": "unit", "required": True, "default": None, "description": ""},
    ]
    assert {kind for kind, _ in listed} > {"credit"}
    of_kind = json.loads(agl("plugins", "--kind", "credit", "--json").stdout)
    assert {row["kind"] for row in of_kind} == {"credit"}
    refused = agl("plugins", "--kind", "credits")
    assert (refused.returncode, "'credit'" in refused.stderr) == (2, True)


INSTALLED = {
    "gone": "import nowhere_to_be_found\n",
    "future": "AGL_API_VERSION = 99\n",
    "late": """
import agl_core

@agl_core.hookimpl
def register_components(register):
    register(agl_core.kinds.ENGINE, "early", lambda options, context: None)
    import a_gpu
    register(agl_core.kinds.ENGINE, "late", lambda options, context: None)

def add_commands(cli):
    import a_terminal
""",
}
BROKEN = {
    "gone": "ModuleNotFoundError: No module named 'nowhere_to_be_found'",
    "future": "The plugin from agl-future 1.2 was written for plugin API 99, this agl has 1. "
    "Install a version of it that fits.",
    "late": "ModuleNotFoundError: No module named 'a_gpu'",
}
CONFIG = """
config_version = 1
agent.entry = "agent:solve"
tasks.train = { source = "jsonl", path = "tasks.jsonl" }
policies.default.model.path = "model"
engine.name = "late"
"""


def test_broken_plugins_are_told_and_stop_only_what_needs_them(
    agl: Agl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for name, code in INSTALLED.items():
        (packages / f"{name}_plugin.py").write_text(code)
        info = packages / f"agl_{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: agl-{name}\nVersion: 1.2\n")
        commands = f"[agl.commands]\n{name} = {name}_plugin:add_commands\n" if name == "late" else ""
        (info / "entry_points.txt").write_text(f"[agl]\n{name} = {name}_plugin\n{commands}")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.chdir(tmp_path)

    listed = agl("plugins", "--json")
    assert listed.returncode == 0, listed.stderr
    nothing = {"kind": "broken", "settings": [], "needs": [], "provides": []}
    rows = json.loads(listed.stdout)
    assert {row["name"]: row for row in rows if row["kind"] == "broken"} == {
        name: {**nothing, "name": name, "origin": f"agl-{name} 1.2", "doc": why} for name, why in BROKEN.items()
    }
    assert {"early", "late"}.isdisjoint(row["name"] for row in rows if row["kind"] == "engine")
    assert "agl-late 1.2" in agl("plugins").stdout

    checked = agl("doctor")
    assert checked.returncode == 0, checked.stdout
    assert "Warning: The commands of agl-late 1.2 cannot be used (ModuleNotFoundError" in checked.stderr
    assert "note  plugins: 'late' of agl-late 1.2 cannot be used (ModuleNotFoundError" in checked.stdout

    (tmp_path / "train.toml").write_text(CONFIG)
    refused = agl("train", "train.toml")
    assert refused.returncode == 2
    assert "[engine] name: there is no engine 'late'." in refused.stderr
    assert f"The plugin 'late' of agl-late 1.2 cannot be used ({BROKEN['late']})" in " ".join(refused.stderr.split())


def test_version(agl: Agl) -> None:
    assert agl("--version").stdout == f"agl {agl_core.__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "pydantic", "httpx", "pluggy", "agl_core.types", "langchain_core", "starlette")
    code = (
        "import sys\nfrom agl_core.cli import main\nsys.argv = ['agl', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print('heavy:', [name for name in {heavy} if name in sys.modules])"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)

    assert result.stdout.endswith("heavy: []\n")


def test_ctrl_c_while_commands_are_imported_ends_without_a_traceback() -> None:
    interrupting = (
        "import sys\nfrom agl_core.__main__ import main\nclass Finder:\n"
        "    def find_spec(*_): raise KeyboardInterrupt\nsys.meta_path.insert(0, Finder)\nmain()"
    )

    ended = subprocess.run([sys.executable, "-c", interrupting], capture_output=True, text=True, timeout=120)

    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("raised", "status", "stderr"),
    [(KeyboardInterrupt(), 130, ""), (StoreError("no"), 2, "Error: no\n")],
    ids=["Ctrl-C", "an error of agl's own"],
)
def test_how_a_command_ends(
    agl: Agl, monkeypatch: pytest.MonkeyPatch, raised: BaseException, status: int, stderr: str
) -> None:
    monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])

    @app.command()
    def fails() -> None:
        raise raised

    result = agl("fails")

    assert (result.returncode, result.stderr) == (status, stderr)
