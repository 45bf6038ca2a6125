"""The command line's frame: `agl plugins`, errors, exit codes, and commands that plugins bring."""

from __future__ import annotations

import json
import os
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


def agl(*arguments: str, cwd: Path | None = None, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, with what is installed in the folder `path` too."""
    inherited = os.environ.get("PYTHONPATH", "")
    return subprocess.run(
        [sys.executable, "-c", "from agl_core.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, inherited)))},
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


BROKEN = """
import agl_core

@agl_core.hookimpl
def register_engines(register):
    import a_gpu
    register("fast", lambda options, context: None)
"""


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """A folder with an installed plugin that is broken, to be put on the path."""
    info = tmp_path / "packages" / "agl_fast-0.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: agl-fast\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text("[agl]\nfast = fast_plugin\n")
    (info.parent / "fast_plugin.py").write_text(BROKEN)
    return str(info.parent)


@pytest.mark.slow
def test_a_broken_plugin_is_told_and_stops_only_what_needs_it(broken: str, tmp_path: Path) -> None:
    listed = agl("plugins", "--json", path=broken)
    assert listed.returncode == 0, listed.stderr
    assert [each for each in json.loads(listed.stdout) if each["kind"] == "broken"] == [
        {
            "kind": "broken",
            "name": "fast",
            "origin": "agl-fast 0.3",
            "doc": "ModuleNotFoundError: No module named 'a_gpu'",
            "settings": [],
            "needs": [],
            "provides": [],
        }
    ]
    table = agl("plugins", path=broken)
    assert "agl-fast 0.3" in table.stdout

    checked = agl("doctor", path=broken)
    assert checked.returncode == 0, checked.stdout
    assert "note  plugins: 'fast' of agl-fast 0.3 cannot be used (ModuleNotFoundError" in checked.stdout

    (tmp_path / "tasks.jsonl").write_text('{"input": "1"}\n')
    (tmp_path / "agent.py").write_text("def solve(task): ...\n")
    config = ENGINE.format(engine="fast")
    (tmp_path / "train.toml").write_text(config)
    refused = agl("train", "train.toml", cwd=tmp_path, path=broken)
    assert refused.returncode == 2
    assert "[engine] name: there is no engine 'fast'." in refused.stderr
    assert (
        "The plugin 'fast' of agl-fast 0.3 cannot be used (ModuleNotFoundError: No module named 'a_gpu')"
        in " ".join(refused.stderr.split())
    )


ENGINE = """
config_version = 1
[agent]
entry = "agent:solve"
[tasks.train]
source = "jsonl"
path = "tasks.jsonl"
[policies.default.model]
path = "model"
[engine]
name = "{engine}"
"""


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
