"""AIR: the reward rule `tool_results`, the credit rule `air`, and that a run cannot have both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agl_core import kinds
from agl_core.builtin.credit import identical
from agl_core.config import check, load
from agl_core.errors import CapabilityError, ConfigError
from agl_core.kinds import Capability
from agl_core.learning import ScoringRule, score
from agl_core.plugins import Plugins
from agl_core.types import CreditKind, Ending, Episode, Reward, ToolResult
from agl_rewards.air import air

STATUSES = st.sampled_from(["ok", "error", "timeout", "empty"])
CALLS = st.lists(st.lists(STATUSES, max_size=3), min_size=1, max_size=5)
RETURNS = st.floats(-2, 2, width=32)


def names_and_values(rule: Callable[[Episode], Any], episode: Episode) -> dict[str, float]:
    return {reward.name: reward.value for reward in rule(episode)}


@pytest.fixture
def user_module() -> Iterator[ModuleType]:
    """A module of the user's that is importable while the test runs."""
    module = ModuleType("my_tool_result_rules")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


class TestToolResults:
    def test_success_earns_what_failure_costs(self, make: Any) -> None:
        episode = make.episode([make.tool_result(each) for each in ("ok", "error", "timeout", "empty")])
        assert names_and_values(make.rule(kinds.REWARD, "tool_results"), episode) == {
            "search.0.ok": 0.2,
            "search.1.error": -0.2,
            "search.2.timeout": -0.2,
            "search.3.empty": -0.2,
        }

    def test_a_tool_call_that_did_not_parse_is_a_failure(self, make: Any) -> None:
        episode = make.episode(make.transition(0, parse_error="no closing brace"))
        assert names_and_values(make.rule(kinds.REWARD, "tool_results"), episode) == {"unparsed": -0.2}

    def test_a_rule_of_the_users_replaces_the_judgement_of_its_tool(self, make: Any, user_module: ModuleType) -> None:
        def http_ok(tool_result: ToolResult) -> bool:
            return bool(tool_result.result["status"] < 400)

        user_module.http_ok = http_ok  # type: ignore[attr-defined]
        rule = make.rule(
            kinds.REWARD, "tool_results", weights={"fetch": 0.5}, rules={"fetch": "my_tool_result_rules:http_ok"}
        )
        answers = [make.tool_result(tool="fetch", result={"status": code}) for code in (200, 404)]
        assert names_and_values(rule, make.episode([*answers, make.tool_result("error")])) == {
            "fetch.0.ok": 0.5,
            "fetch.1.ok": -0.5,
            "search.2.error": -0.2,
        }

    def test_a_users_rule_may_give_a_share_or_nothing(self, make: Any, user_module: ModuleType) -> None:
        user_module.rule = lambda tool_result: tool_result.result  # type: ignore[attr-defined]
        rule = make.rule(kinds.REWARD, "tool_results", rules={"search": "my_tool_result_rules:rule"})
        episode = make.episode(
            [make.tool_result(result=0.5), make.tool_result(result=None), make.tool_result(result=0)]
        )
        assert names_and_values(rule, episode) == {"search.0.ok": 0.1, "search.2.ok": 0.0}

    @pytest.mark.parametrize(
        ("result", "seen"),
        [
            ({"status": 404}, {"status": 404}),
            ('{"status": 404}', {"status": 404}),
            (' [1, "a"]\n', [1, "a"]),
            ([{"type": "text", "text": '{"a": '}, {"type": "text", "text": "1}"}], {"a": 1}),
            ([{"type": "text", "text": "words"}], [{"type": "text", "text": "words"}]),
            (
                [{"type": "text", "text": "{}"}, {"type": "image_url"}],
                [{"type": "text", "text": "{}"}, {"type": "image_url"}],
            ),
            ([], []),
            ("2020", "2020"),
            ('"words"', '"words"'),
            ("[sic]", "[sic]"),
            ('{"cut": "for its leng… (12 more characters)', '{"cut": "for its leng… (12 more characters)'),
            ("[" * 100_000, "[" * 100_000),
            (None, None),
        ],
        ids=lambda value: repr(value)[:20],
    )
    def test_a_users_rule_sees_what_the_tool_returned_and_not_its_json_text(
        self, make: Any, user_module: ModuleType, result: Any, seen: Any
    ) -> None:
        met: list[ToolResult] = []
        user_module.rule = met.append  # type: ignore[attr-defined]
        rule = make.rule(kinds.REWARD, "tool_results", rules={"search": "my_tool_result_rules:rule"})
        told = make.tool_result(result=result, tool_call_id="t1")
        assert rule(make.episode([told])) == []
        assert met == [replace(told, result=seen)]
        assert told.result == result

    async def test_rewards_belong_to_the_call_and_choice_that_asked(self, make: Any) -> None:
        episode = make.episode(
            make.transition(0, make.tool_result("error")),
            make.transition(1),
            make.transition(2, make.tool_result(), make.tool_result()),
            make.transition(2, choice=1),
        )
        rules = [ScoringRule("tools", make.rule(kinds.REWARD, "tool_results"), 0.5)]
        scored, errors = await score(episode, rules, dict.fromkeys(Ending, "score"))
        assert errors == []
        assert [t.reward for t in scored.transitions] == pytest.approx([-0.1, 0.0, 0.2, 0.0])
        assert {r.source for t in scored.transitions for r in t.rewards} == {"tools"}
        keys = [(r.name, r.call, r.choice) for t in scored.transitions for r in t.rewards]
        assert len(set(keys)) == len(keys)
        assert scored.terminal == 0.0


class TestAir:
    def test_rewards_of_single_calls_are_in_it_only_where_the_return_is_asked_for(self, make: Any) -> None:
        calls = [
            make.transition(0, make.tool_result("ok")),
            make.transition(1, make.tool_result("error")),
            make.transition(2),
        ]
        earned = replace(calls[2], rewards=(Reward("r", 0, "step", 2.0, "test", "c2"),))
        one = make.episode(*calls[:2], earned, terminal=0.5)
        assert air([one]) == [pytest.approx([0.6, 0.2, 0.5])]
        assert air([one], reward="return") == [pytest.approx([2.2, 1.8, 2.5])]

    def test_status_and_terminal_reward_are_mixed(self, make: Any) -> None:
        episode = make.episode(
            [make.tool_result("ok")],
            [make.tool_result("timeout")],
            [make.tool_result("ok"), make.tool_result("empty")],
            [],
            terminal=0.5,
        )
        assert air([episode]) == [pytest.approx([0.6, 0.2, 0.4, 0.5])]

    def test_a_tool_call_that_did_not_parse_is_a_failure(self, make: Any) -> None:
        assert air([make.episode(make.transition(0, parse_error="…"), terminal=1.0)], alpha=0.5) == [[0.0]]

    @given(calls=CALLS, terminal=RETURNS, alpha=st.floats(0, 1))
    def test_values_lie_between_status_and_reward_which_stays_readable(
        self, make: Any, calls: list[list[str]], terminal: float, alpha: float
    ) -> None:
        episode = make.episode(*[[make.tool_result(s) for s in call] for call in calls], terminal=terminal)
        for call, value in zip(calls, air([episode], alpha=alpha)[0], strict=True):
            if not call:
                assert value == terminal
                continue
            status = sum(1 if each == "ok" else -1 for each in call) / len(call)
            assert min(status, terminal) - 1e-9 <= value <= max(status, terminal) + 1e-9
            assert value - alpha * status == pytest.approx((1 - alpha) * terminal, abs=1e-9)

    @given(calls=CALLS, terminal=RETURNS)
    def test_without_weight_it_is_identical(self, make: Any, calls: list[list[str]], terminal: float) -> None:
        episodes = [make.episode(*[[make.tool_result(s) for s in call] for call in calls], terminal=terminal)]
        assert air(episodes, alpha=0.0) == identical(episodes)

    def test_it_yields_returns_and_its_share_is_bounded(self, make: Any) -> None:
        component = Plugins.load().component(kinds.CREDIT, "air", "[credit]")
        assert (component.yields, component.provides) == ({CreditKind.RETURN}, {Capability.TOOL_RESULTS})
        assert make.rule(kinds.CREDIT, "air", alpha=1.0)([make.episode([make.tool_result()], terminal=5.0)]) == [[1.0]]
        for wrong in (-0.1, 1.1):
            with pytest.raises(ValidationError):
                make.rule(kinds.CREDIT, "air", alpha=wrong)


PARTS = """
import agl_core

@agl_core.hookimpl
def register_components(register):
    register(agl_core.kinds.ENGINE, "none", lambda options, context: None)
    register(agl_core.kinds.ALGORITHM, "none", lambda options: None, takes=agl_core.CreditKind.RETURN)
"""

CONFIG = """
config_version = 1
plugins = ["parts_of_a_run.py"]
agent.entry = "my_agent:solve"
tasks.train = { source = "jsonl", path = "tasks.jsonl" }
policies.default.model.path = "weights"
algorithm.name = "none"
engine.name = "none"
"""


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    (tmp_path / "parts_of_a_run.py").write_text(PARTS)
    (tmp_path / "train.toml").write_text(CONFIG)
    return tmp_path / "train.toml"


def test_air_and_tool_results_are_refused_together(configuration: Path) -> None:
    for alone in ("credit.name=air", "rewards.tool_results.default_weight=0.1"):
        check(load(configuration, [alone]))
    with pytest.raises(CapabilityError, match=r"'air'.* and reward 'tool_results'.*a tool result would count twice"):
        check(load(configuration, ["credit.name=air", "rewards.tools.rule=tool_results"]))


def test_a_function_that_is_not_there_is_found_when_the_run_is_checked(configuration: Path) -> None:
    check(load(configuration, ["rewards.tool_results.rules.fetch=math:sqrt"]))
    for entry in ("no_such_module:f", "math:no_such_name", "math:pi"):
        loaded = load(configuration, [f"rewards.tools.rules.fetch={entry}", "rewards.tools.rule=tool_results"])
        with pytest.raises(ConfigError, match=rf"rules\.fetch = '{entry}'"):
            check(loaded)
    with pytest.raises(ConfigError, match=r"rewards\.tool_results\.rules\] fetch: must be 'module:function'"):
        load(configuration, ["rewards.tool_results.rules.fetch=math"])
