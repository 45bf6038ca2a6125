"""README's first screen is played: a callback in an agent that exists, reward rules, and `agl reward try`."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from typer.testing import CliRunner

import agl_core
from agl_core.cli import app
from agl_core.testing.scripts import CallTools, Say
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Mode, ToolStatus
from agl_rewards import evaluators

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
    assert (first.member, second.member) == (0, 1)
    assert [[r.status for r in t.tool_results] for t in first.transitions] == [[ToolStatus.OK], []]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--set", "brevty.limit=8"], "brevty: there is no such rule. Did you mean 'brevity'?"),
        (["--set", "brevity.limt=8"], "[brevity] limt: reward 'brevity' (my_rewards.py) does not honour it"),
        (["--set", "brevity.rule=right"], "[brevity] rule: has no effect here"),
        (["others.py"], "Two rules are named 'brevity': my_rewards.py, others.py."),
        (["train"], "Give one configuration"),
        (["--run", "."], "my_rewards.py is no configuration"),
        (["--set", "brevity.limit=short"], "[brevity] limit: must"),
        (["--run", "nothing.jsonl"], "nothing.jsonl cannot be read"),
    ],
)
def test_a_mistake_is_named(played: Path, arguments: list[str], problem: str) -> None:
    (played / "train").touch()
    (played / "others.py").write_text(RULES.replace("def right", "def other"))
    tried = CliRunner().invoke(app, ["reward", "try", "my_rewards.py", "--run", "episodes.jsonl", *arguments])
    assert problem in str(tried.exception)


def test_a_rule_that_fails_is_named_and_the_others_are_shown(played: Path) -> None:
    (played / "my_rewards.py").write_text(RULES.replace('metadata["answer"]', 'metadata["anser"]'))
    tried = CliRunner().invoke(app, ["reward", "try", "my_rewards.py", "--run", "episodes.jsonl"])
    assert "2 episodes, mean reward -\n" in tried.output
    assert "brevity" in tried.output
    assert "right" in str(tried.exception)
    assert "KeyError: 'anser'" in str(tried.exception)


@pytest.mark.parametrize(("options", "rewarded"), [([], 2), (["--set", 'brevity.modes=["train"]'], 0)])
def test_episodes_of_every_mode_are_scored(played: Path, options: list[str], rewarded: int) -> None:
    used = [replace(episode, mode=Mode.USE) for episode in agl_core.load_episodes(played / "episodes.jsonl")]
    agl_core.save_episodes("used.jsonl", used)
    tried = CliRunner().invoke(app, ["reward", "try", "my_rewards.py", "--run", "used.jsonl", "--json", *options])
    assert ["brevity" in row["rewards"] for row in json.loads(tried.output)].count(True) == rewarded


def test_runs_of_one_task_are_a_group_and_a_weight_counts(played: Path) -> None:
    code = (
        "import agl_core\n@agl_core.group_reward_rule\ndef size(episodes):\n    return [len(episodes)] * len(episodes)"
    )
    (played / "sizes.py").write_text(code)
    tried = CliRunner().invoke(
        app, ["reward", "try", "sizes.py", "--run", "episodes.jsonl", "--set", "size.weight=0.5", "--json"]
    )
    assert [(row["rewards"], row["reward"]) for row in json.loads(tried.output)] == [({"size": 2.0}, 1.0)] * 2


def test_installed_rules_are_tried_by_name_and_from_a_file_that_is_their_source_or_imports_them(played: Path) -> None:
    (played / "theirs.py").write_text("from agl_rewards.evaluators import regex_format")
    every = [evaluators.__file__, "theirs.py", "--set", "overlong.limit=9", "--set", "overlong.buffer=3"]
    for rules in (["regex_format", "token_f1"], ["theirs.py"], every):
        arguments = ["--set", "regex_format.pattern=It", "--set", "regex_format.weight=2"]
        tried = CliRunner().invoke(app, ["reward", "try", *rules, "--run", "episodes.jsonl", *arguments])
        assert "regex_format" in tried.output, tried.exception
    tried = CliRunner().invoke(app, ["reward", "try", "regex_fromat", "--run", "episodes.jsonl"])
    assert "no reward 'regex_fromat'. Did you mean 'regex_format'?" in str(tried.exception)


def test_a_file_without_rules_is_refused(played: Path) -> None:
    (played / "empty.py").write_text("")
    tried = CliRunner().invoke(app, ["reward", "try", "empty.py", "--run", "episodes.jsonl"])
    assert "empty.py has no reward rule" in str(tried.exception)
