"""Published task formats become tasks that harnesses solve and hidden tests judge."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from agl_core.config.models import UntrainedConfig
from agl_core.errors import ConfigError
from agl_core.kinds import TASK_SOURCE
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_harnesses import grading
from agl_harnesses.sandbox import confined
from agl_harnesses.workspace import Workspaces, WorkspaceSection, task_source

WRONG, RIGHT = "def half(n):\n    return n // 2 + 1\n", "def half(n):\n    return n // 2\n"
TEST = "from halves import half\n\ndef test_half():\n    assert half(4) == 2\n\ndef test_type():\n    assert half(2)\n"


def swe(folder: Path, **settings: Any) -> Any:
    component = Plugins.load().component(TASK_SOURCE, "swe", "the test")
    return component.build(component.options(**settings), folder, 0)


def git(*arguments: str, folder: Path) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


async def test_a_row_of_swe_is_solved_in_a_copy_of_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    clone = tmp_path / "clones" / "owner" / "halves"
    clone.mkdir(parents=True)
    (clone / "halves.py").write_text(WRONG)
    git("init", "--quiet", folder=clone)
    git("add", ".", folder=clone)
    git("commit", "--quiet", "-m", "Halves", folder=clone)
    base = git("rev-parse", "HEAD", folder=clone).strip()
    (clone / "test_halves.py").write_text(TEST)
    git("add", ".", folder=clone)
    row = {
        "instance_id": "owner__halves-1",
        "repo": "owner/halves",
        "base_commit": base,
        "problem_statement": "half(4) is 3.",
        "test_patch": git("diff", "--cached", folder=clone),
        "FAIL_TO_PASS": json.dumps(["test_halves.py::test_half"]),
        "PASS_TO_PASS": ["test_halves.py::test_type"],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    tasks = swe(tmp_path, path=tmp_path / "rows.jsonl", repositories=str(tmp_path / "clones" / "{repo}"))
    task = tasks.task(0)
    assert (tasks.size, task.id, task.input["prompt"]) == (1, "owner__halves-1", "half(4) is 3.")
    workspaces = Workspaces(WorkspaceSection(), tmp_path)
    config = UntrainedConfig.model_validate({"config_version": 1, "folder": tmp_path})
    rule: Any = grading.tests_pass(grading.TestsPassOptions(), config)
    rewards = []
    for name, code in (("unchanged", WRONG), ("fixed", RIGHT), ("other", "half = abs\n")):
        workspace = workspaces.create(task_source(task.input), tmp_path / name)
        assert (workspace.path / "halves.py").read_text() == WRONG
        assert not (workspace.path / "test_halves.py").exists()
        (workspace.path / "halves.py").write_text(code)
        [reward] = await rule(make.episode(result={"text": "", "diff": workspace.diff()}, task=task))
        rewards.append(reward.value)
    assert rewards == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("lines", "words"),
    [("{\n", "line 1 is no JSON"), ('\n{"instance_id": "a"}\n', "line 2 has no 'FAIL_TO_PASS'"), (None, "cannot read")],
)
def test_a_row_that_is_no_task_is_named(lines: str | None, words: str, tmp_path: Path) -> None:
    if lines is not None:
        (tmp_path / "rows.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match=words):
        swe(tmp_path, path=tmp_path / "rows.jsonl")


def test_verifiers_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    component = Plugins.load().component(TASK_SOURCE, "verifiers", "the test")
    with pytest.raises(ConfigError, match="needs the package verifiers, which is not installed: pip install"):
        component.build(component.options(package="gsm8k"), tmp_path, 0)


VERIFIERS = """
from types import SimpleNamespace

class MultiTurnEnv:
    rubric, eval_dataset_source = SimpleNamespace(has_group_rewards=False), None
    setup_state = get_prompt_messages = env_response = rollout = call_tool = lambda self: None

class SingleTurnEnv(MultiTurnEnv):
    env_response = lambda self: None

class ToolEnv(MultiTurnEnv):
    def __init__(self, tools):
        self.tools = {tool.__name__: tool for tool in tools}
        schema = {"type": "object", "properties": {"item": {"type": "string"}}}
        self.tool_defs = [SimpleNamespace(name=name, description="", parameters=schema) for name in self.tools]
        self.error_formatter = "no {}".format

    async def call_tool(self, name, arguments, id):
        return SimpleNamespace(content=str(self.tools[name](**arguments)))

    def get_dataset(self):
        return [{"prompt": "Buy a pear.", "answer": "4", "example_id": 0}]
"""
SHOP = """
from verifiers import ToolEnv

def price(item):
    print("Tools may print.")
    return {"pear": 4}[item]

load_environment = lambda: ToolEnv([price])
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="the package bubblewrap is missing")
async def test_the_tools_of_an_environment_are_served_in_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make test-harnesses` does the same with verifiers itself."""
    for name in ("packages", "work", "home"):
        (tmp_path / name).mkdir()
    (tmp_path / "packages" / "verifiers.py").write_text(VERIFIERS)
    (tmp_path / "packages" / "shop.py").write_text(SHOP)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "verifiers", raising=False)
    component = Plugins.load().component(TASK_SOURCE, "verifiers", "the test")
    task = component.build(component.options(package="shop"), tmp_path, 0).task(0)
    assert (task.id, task.input["prompt"]) == ("shop-train-0", "Buy a pear.")
    server = task.input["mcp_servers"]["environment"]
    section = WorkspaceSection(runner="bubblewrap", reads=(tmp_path / "packages",))
    command = [server["command"].replace("{python}", sys.executable), *server["args"]]
    places: Any = {"workspace": tmp_path / "work", "home": tmp_path / "home"}
    async with confined(command, section=section, **places) as line:
        variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "packages")}
        started = StdioServerParameters(command=line[0], args=line[1:], env=variables)
        async with stdio_client(started) as streams, ClientSession(*streams) as session:
            await session.initialize()
            assert [tool.name for tool in (await session.list_tools()).tools] == ["price"]
            results = [await session.call_tool("price", {"item": item}) for item in ("pear", "plum")]
    assert [(result.isError, result.content[0].text) for result in results] == [
        (False, "4"),
        (True, "Error: no 'plum'"),
    ]
