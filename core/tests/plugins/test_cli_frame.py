"""The command line's frame: `agl plugins`, errors, exit codes, and commands that plugins bring."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from agl_command import Agl, agl_in_process  # noqa: F401

from agl_core.cli import COMMANDS, app
from agl_core.errors import AglError, StoreError

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

    listed = {(each["kind"], each["name"]): each for each in json.loads(result.stdout)}
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


def test_plugins_of_one_kind_can_be_listed_alone(agl: Agl) -> None:
    listed = agl("plugins", "--kind", "credit", "--json")
    assert {each["kind"] for each in json.loads(listed.stdout)} == {"credit"}
    refused = agl("plugins", "--kind", "credits")
    assert refused.returncode == 2
    assert "'credit'" in refused.stderr


BROKEN = """
import agl_core

@agl_core.hookimpl
def register_components(register):
    import a_gpu
    register(agl_core.kinds.ENGINE, "fast", lambda options, context: None)

def add_commands(cli):
    import a_terminal
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed plugin that is broken."""
    info = tmp_path / "packages" / "agl_fast-0.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: agl-fast\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text(
        "[agl]\nfast = fast_plugin\n[agl.commands]\nfast = fast_plugin:add_commands\n"
    )
    (info.parent / "fast_plugin.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(info.parent))


@pytest.mark.usefixtures("broken")
def test_a_broken_plugin_is_told_and_stops_only_what_needs_it(
    agl: Agl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    listed = agl("plugins", "--json")
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
    table = agl("plugins")
    assert "agl-fast 0.3" in table.stdout

    checked = agl("doctor")
    assert checked.returncode == 0, checked.stdout
    assert "Warning: The commands of agl-fast 0.3 cannot be used (ModuleNotFoundError" in checked.stderr
    assert "note  plugins: 'fast' of agl-fast 0.3 cannot be used (ModuleNotFoundError" in checked.stdout

    (tmp_path / "tasks.jsonl").write_text('{"input": "1"}\n')
    (tmp_path / "agent.py").write_text("def solve(task): ...\n")
    config = ENGINE.format(engine="fast")
    (tmp_path / "train.toml").write_text(config)
    refused = agl("train", "train.toml")
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


def test_an_error_is_one_paragraph_and_status_2(agl: Agl) -> None:
    result = agl("plugins", "nowhere.py")

    assert result.returncode == 2
    assert result.stderr.startswith("Error: There is no Python file nowhere.py.")
    assert "Traceback" not in result.stderr


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


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (AglError("no"), 2, "Error: no\n"),
        (StoreError("no"), 2, "Error: no\n"),
    ],
    ids=["Ctrl-C", "AglError", "StoreError"],
)
def test_how_a_command_ends(
    agl: Agl, monkeypatch: pytest.MonkeyPatch, raised: BaseException, status: int, said: str
) -> None:
    monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])

    @app.command()
    def fails() -> None:
        raise raised

    result = agl("fails")

    assert (result.returncode, result.stderr) == (status, said)


def test_the_list_of_commands_says_what_each_commands_own_help_says() -> None:
    for name, command in COMMANDS.items():
        loaded = command.load(name)
        assert (loaded.help or "").split()[:3] == command.help.split()[:3], name
