"""AIR: the reward rule `tool_results`, the credit rule `air`, and that a run cannot have both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agl_core import kinds
from agl_core.config import check, load
from agl_core.errors import CapabilityError
from agl_core.kinds import Capability
from agl_core.learning import ScoringRule, score
from agl_core.plugins import Plugins
from agl_core.types import CreditKind, Ending, Episode, Reward
from agl_rewards.air import air

STATUSES = st.sampled_from(["ok", "error", "timeout", "empty"])
CALLS = st.lists(st.lists(STATUSES, max_size=3), min_size=1, max_size=5)
RETURNS = st.floats(-2, 2, width=32)


def names_and_values(rule: Callable[[Episode], Any], episode: Episode) -> dict[str, float]:
    return {reward.name: reward.value for reward in rule(episode)}


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

    def test_each_tool_may_have_its_weight(self, make: Any) -> None:
        rule = make.rule(kinds.REWARD, "tool_results", weights={"fetch": 0.5})
        episode = make.episode([make.tool_result(tool="fetch"), make.tool_result("error")])
        assert names_and_values(rule, episode) == {"fetch.0.ok": 0.5, "search.1.error": -0.2}

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
