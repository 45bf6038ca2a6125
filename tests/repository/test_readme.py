"""README's first screen is played: a callback in an agent that exists, reward rules, and `agl reward try`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from typer.testing import CliRunner

import agl_core
from agl_core.cli import app
from agl_core.testing.scripts import CallTools, Say
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import ToolStatus

README = (Path(__file__).parents[2] / "README.md").read_text().partition("\n## Two commands\n")[0]
(CODE, RULES), (SESSION,) = (re.findall(rf"(?s)```{kind}\n(.*?)```", README) for kind in ("python", "text"))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the files of README after its code ran."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(RULES)
    with ScriptedUpstream() as upstream:
        upstream.script(CallTools([("add", {"a": 1, "b": 2})]), Say("It is 3."), Say("I do not know that."))
        client = ChatOpenAI(model="m", base_url=upstream.url, api_key="none")  # type: ignore[arg-type]
        exec(CODE, {"agent": create_agent(client, [add], name="solver")})
    return tmp_path


def test_the_first_screen_prints_what_it_says(played: Path) -> None:
    command, expected = SESSION.removeprefix("$ agl ").split("\n", 1)
    tried = CliRunner().invoke(app, shlex.split(command))
    assert (tried.exit_code, [line.rstrip() for line in tried.output.splitlines()]) == (0, expected.splitlines())


def test_an_episode_of_a_callback_has_its_task_its_answer_and_its_transitions(played: Path) -> None:
    first, second = agl_core.load_episodes(played / "episodes.jsonl")
    assert (first.result, first.task.id, first.group) == ("It is 3.", "sum", second.group)
    assert [[r.status for r in t.tool_results] for t in first.transitions] == [[ToolStatus.OK], []]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--set", "brevty.limit=8"], "brevty: there is no such rule. Did you mean 'brevity'?"),
        (["--set", "brevity.limt=8"], "[brevity] limt: reward 'brevity' (my_rewards.py) does not honour it"),
        (["--set", "brevity.limit=short"], "[brevity] limit: must"),
        (["--run", "nothing.jsonl"], "nothing.jsonl cannot be read"),
    ],
)
def test_a_mistake_is_named(played: Path, arguments: list[str], problem: str) -> None:
    tried = CliRunner().invoke(app, ["reward", "try", "my_rewards.py", "--run", "episodes.jsonl", *arguments])
    assert problem in str(tried.exception)


def test_a_rule_that_fails_is_named_and_the_others_are_shown(played: Path) -> None:
    (played / "my_rewards.py").write_text(RULES.replace('metadata["answer"]', 'metadata["anser"]'))
    tried = CliRunner().invoke(app, ["reward", "try", "my_rewards.py", "--run", "episodes.jsonl"])
    assert "2 episodes" in tried.output
    assert "right" in str(tried.exception)
    assert "KeyError: 'anser'" in str(tried.exception)


def test_a_file_without_rules_is_refused(played: Path) -> None:
    (played / "empty.py").write_text("")
    tried = CliRunner().invoke(app, ["reward", "try", "empty.py", "--run", "episodes.jsonl"])
    assert "empty.py has no reward rule" in str(tried.exception)
