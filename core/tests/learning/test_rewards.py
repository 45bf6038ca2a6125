"""Reward rules over episodes."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from agl_core.learning import ScoringRule, build_episode, identical, score, score_all
from agl_core.learning.rewards import reported
from agl_core.types import DropReason, Ending, Episode, Reward

SCORE = dict.fromkeys(Ending, "score")


@pytest.fixture
def episode(make: Any) -> Episode:
    return build_episode(make.rollout(), make.attempt(), [make.call(0), make.call(1)])


async def test_the_terminal_reward_is_the_weighted_sum_with_provenance(episode: Episode) -> None:
    async def slow(_: Episode) -> float:
        return 1.0

    rules = [
        ScoringRule("right", slow, 0.9),
        ScoringRule("style", lambda e: {"short": 0.5, "polite": 1.0}, 0.1),
        ScoringRule("silent", lambda e: None),
    ]
    scored, errors = await score(episode, rules, SCORE)
    assert errors == []
    assert scored.terminal == pytest.approx(0.9 * 1.0 + 0.1 * 1.5)
    assert {r.name: (r.value, r.source) for r in scored.rewards} == {
        "right": (1.0, "right"),
        "style.short": (0.5, "style"),
        "style.polite": (1.0, "style"),
    }


async def test_rewards_of_single_calls_go_to_their_transitions_and_into_the_return(episode: Episode) -> None:
    def tools(e: Episode) -> list[Reward]:
        return [Reward(e.rollout, e.attempt, "tool", 0.2, "", call=e.transitions[0].key.call)]

    scored, _ = await score(episode, [ScoringRule("tools", tools, 0.5), ScoringRule("end", lambda e: 1.0)], SCORE)
    assert [t.reward for t in scored.transitions] == [0.1, 0.0]
    assert scored.transitions[0].rewards[0].source == "tools"
    assert identical([scored]) == [[1.1, 1.1]]


@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_a_reward_that_is_not_finite_drops_the_episode(episode: Episode, value: float) -> None:
    scored, _ = await score(episode, [ScoringRule("bad", lambda e: value)], SCORE)
    assert scored.dropped is DropReason.NON_FINITE


@pytest.mark.parametrize("fault", [math.nan, math.inf, KeyError("result")])
async def test_a_rule_that_only_measures_drops_nothing(episode: Episode, fault: Any) -> None:
    def measured(_: Episode) -> float:
        if isinstance(fault, Exception):
            raise fault
        return float(fault)

    scored, [error] = await score(
        episode, [ScoringRule("measured", measured, 0.0), ScoringRule("end", lambda e: 1.0)], SCORE
    )
    assert (scored.dropped, scored.terminal) == (None, 1.0)
    assert [r.name for r in scored.rewards] == ["end"]
    assert "The reward rule 'measured' failed" in error.__notes__[0]


async def test_what_rules_wait_for_is_waited_for_together(episode: Episode) -> None:
    here = asyncio.Barrier(3)

    async def met(e: Episode) -> float:
        async with asyncio.timeout(30):
            await here.wait()  # Nobody goes on before all three are here.
        return float(e.member)

    episodes = [replace(episode, member=member) for member in range(3)]
    scored = await score_all(episodes, [ScoringRule("met", met)], SCORE)
    assert [each.terminal for each, _ in scored] == [0.0, 1.0, 2.0]


async def test_a_rule_that_raises_drops_the_episode_and_is_reported(episode: Episode) -> None:
    def broken(_: Episode) -> float:
        raise KeyError("result")

    scored, errors = await score(episode, [ScoringRule("broken", broken)], SCORE)
    assert scored.dropped is DropReason.REWARD_FAILED
    assert [type(e) for e in errors] == [KeyError]


async def test_the_table_of_endings_decides_before_any_rule(episode: Episode) -> None:
    rules = [ScoringRule("one", lambda e: 1.0)]
    late = replace(episode, ending=Ending.TIMED_OUT)
    fixed, _ = await score(late, rules, SCORE | {Ending.TIMED_OUT: -0.5})
    assert (fixed.terminal, fixed.rewards[0].source) == (-0.5, "endings")
    dropped, _ = await score(late, rules, SCORE | {Ending.TIMED_OUT: "drop"})
    assert dropped.dropped is DropReason.ENDING
    judged, _ = await score(late, rules, SCORE)
    assert judged.terminal == 1.0


def test_reported_sums_what_the_agent_said_and_is_silent_without(episode: Episode) -> None:
    said = [Reward("r", 0, "a", 0.25, "agent"), Reward("r", 0, "b", 0.5, "agent"), Reward("r", 0, "c", 9.0, "rule")]
    assert reported(replace(episode, rewards=tuple(said))) == 0.75
    assert reported(episode) is None
