"""The command line's frame: `agl plugins`, errors, exit codes, and commands that plugins bring."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from agl_command import Agl, agl_in_process  # noqa: F401

from agl_core.cli import app
from agl_core.errors import StoreError

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
    assert listed["store", "sqlite"]["origin"].startswith("agl-core ")
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


def test_version_and_help(agl: Agl) -> None:
    from agl_core import __version__

    assert agl("--version").stdout == f"agl {__version__}\n"
    shown = agl("--help").stdout
    for command in ("train", "eval", "rollouts", "show", "plugins"):
        assert command in shown


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
