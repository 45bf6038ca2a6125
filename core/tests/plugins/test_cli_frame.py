"""The command line's frame: `agl plugins`, errors, exit codes, and commands that plugins bring."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = '''
import agl_core
from pydantic import BaseModel

@agl_core.reward_rule
def shortness(episode, *, limit: int = 20, unit: str):
    """1 if the answer is short."""

class Options(BaseModel):
    model: str

@agl_core.hookimpl
def register_rewards(register):
    register("torn", print, options=Options, needs=lambda o: {agl_core.Need.CRITIC} if o.model else ())
'''


def agl(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    return subprocess.run(
        [sys.executable, "-c", "from agl_core.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
    )


def test_plugins_lists_what_the_core_and_a_users_file_bring(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)

    result = agl("plugins", "mine.py", "--json", cwd=tmp_path)

    listed = {(each["kind"], each["name"]): each for each in json.loads(result.stdout)}
    assert {("store", "sqlite"), ("task source", "jsonl"), ("credit", "identical")} <= set(listed)
    assert listed["credit", "identical"]["provides"] == ["returns"]
    assert listed["store", "sqlite"]["origin"].startswith("agl-core ")
    mine = listed["reward", "shortness"]
    assert (mine["origin"], mine["doc"], mine["needs"]) == ("mine.py", "1 if the answer is short.", [])
    assert listed["reward", "torn"]["needs"] is None
    assert mine["settings"] == [
        {"name": "limit", "required": False, "default": 20, "description": ""},
        {"name": "unit", "required": True, "default": None, "description": ""},
    ]


def test_plugins_prints_a_table_too() -> None:
    result = agl("plugins")

    assert result.returncode == 0
    for word in ("kind", "jsonl", "sqlite", "identical", "input_field"):
        assert word in result.stdout


def test_an_error_is_one_paragraph_and_status_2() -> None:
    result = agl("plugins", "nowhere.py")

    assert result.returncode == 2
    assert result.stderr.startswith("Error: The plugin file nowhere.py does not exist.")
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback() -> None:
    result = agl("--debug", "plugins", "nowhere.py")

    assert result.returncode != 0
    assert "Traceback" in result.stderr
    assert "PluginError" in result.stderr


def test_version_and_help() -> None:
    from agl_core import __version__

    assert agl("--version").stdout == f"agl {__version__}\n"
    shown = agl("--help").stdout
    for command in ("train", "eval", "rollouts", "show", "plugins"):
        assert command in shown


def test_an_unknown_command_is_refused() -> None:
    result = agl("trian")

    assert result.returncode == 2
    assert "trian" in result.stderr


def test_help_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "langchain_core", "starlette", "aiohttp", "openai")
    code = (
        "import sys\nfrom agl_core.cli import main\nsys.argv = ['agl', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print('heavy:', [name for name in {heavy} if name in sys.modules])"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)

    assert result.stdout.endswith("heavy: []\n")


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "AglError('no')", "StoreError('no')"])
def test_how_a_command_ends(raised: str) -> None:
    code = (
        "from agl_core.cli import app, main\nfrom agl_core.errors import AglError, StoreError\n"
        f"@app.command()\ndef fails() -> None:\n    raise {raised}\n"
        "import sys\nsys.argv = ['agl', 'fails']\nmain()"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)

    assert result.returncode == (130 if raised == "KeyboardInterrupt" else 2)
    assert "Traceback" not in result.stderr
    assert ("Error: no" in result.stderr) == (raised != "KeyboardInterrupt")
