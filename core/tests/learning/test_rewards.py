"""Reward rules over episodes."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_core.builtin import identical
from agl_core.learning.rewards import ScoringRule, failure_text, reported, score, score_all, score_groups
from agl_core.learning.transitions import build_episode
from agl_core.protocols import GroupRewardRule, RewardValue
from agl_core.testing import episodes as make
from agl_core.types import DropReason, Ending, Episode, Reward, TransitionKey

SCORE = dict.fromkeys(Ending, "score")


@pytest.fixture
def episode() -> Episode:
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
        return [Reward(e.rollout, e.attempt, "tool", value, "", e.transitions[0].key.call) for value in (0.15, 0.05)]

    def mixed(e: Episode) -> dict[str | TransitionKey, float]:
        return {"answer": 1.0, e.transitions[1].key: 0.5}

    scored, errors = await score(episode, [ScoringRule("tools", tools, 0.5), ScoringRule("mixed", mixed)], SCORE)
    assert (errors, scored.terminal, [r.name for r in scored.rewards]) == ([], 1.0, ["mixed.answer"])
    assert [t.reward for t in scored.transitions] == [0.1, 0.5]
    assert [(r.name, r.source) for t in scored.transitions for r in t.rewards] == [
        ("tool", "tools"),
        ("mixed", "mixed"),
    ]
    assert identical([scored]) == [[1.6, 1.6]]


def raising(error: BaseException) -> Any:
    def rule(_: Episode) -> float:
        raise error

    return rule


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (raising(KeyError("result")), "'result'"),
        (lambda e: sys.exit(1), "it raised SystemExit"),
        (lambda e: {e.transitions[0].key._replace(call="elsewhere"): 1.0}, "which the episode does not have"),
        *(
            (lambda e, value=value: value, f"it gave {value!r}, which is no number")
            for value in ("0.5", "yes", b"1", [1.0], [["a", 1]])
        ),
        (lambda e: {"part": "high"}, "it gave 'high', which is no number"),
        (lambda e: {"a": {}}, "it gave {}, which is no number"),
        (lambda e: math.nan, "it gave nan"),
        (lambda e: math.inf, "it gave inf"),
        (lambda e: 1e39, "which is no finite number in single precision"),
    ],
)
async def test_a_rule_that_fails_drops_the_episode_unless_it_only_measures(
    episode: Episode, rule: Any, problem: str
) -> None:
    end = ScoringRule("end", lambda e: 1.0)
    scored, [error] = await score(episode, [ScoringRule("bad", rule), end], SCORE)
    reason = DropReason.NON_FINITE if problem.startswith(("it gave nan", "it gave inf", "which is no finite")) else None
    assert (scored.dropped, scored.terminal) == (reason or DropReason.REWARD_FAILED, None)
    assert problem in str(error)
    assert [reward.value for reward in scored.rewards if reward.name == "end"] == [1.0], "the others are shown"
    scored, [error] = await score(episode, [ScoringRule("bad", rule, 0.0), end], SCORE)
    assert (scored.dropped, scored.terminal, [r.name for r in scored.rewards]) == (None, 1.0, ["end"])
    assert set(error.__notes__) == {"The reward rule 'bad' failed on rollout r."}


async def test_a_service_gets_a_few_requests_at_a_time_and_no_rule_waits_for_another(episode: Episode) -> None:
    open_now, most, here = 0, 0, asyncio.Barrier(16)

    async def asks(e: Episode) -> float:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await here.wait()  # Nobody goes on before sixteen are here.
        await asyncio.sleep(0.01)  # A seventeenth would come now.
        open_now -= 1
        return float(e.member)

    free, begun = asyncio.Event(), threading.Semaphore(0)

    async def is_stuck(e: Episode) -> float:
        begun.release()
        await free.wait()
        return 1.0

    async def frees(e: Episode) -> float:
        free.set()
        return 1.0

    members = [replace(episode, member=member) for member in range(48)]
    scored = await score_all(members, [ScoringRule("asks", asks, time_limit=30)], SCORE)
    assert ([one.terminal for one, _ in scored], most) == ([*range(48)], 16)
    stuck = asyncio.create_task(score_all([episode] * 40, [ScoringRule("stuck", is_stuck, time_limit=30)], SCORE))
    for _ in range(16):
        assert await asyncio.to_thread(begun.acquire, timeout=30)
    await score_all([episode], [ScoringRule("frees", frees)], SCORE)
    assert {one.terminal for one, _ in await stuck} == {1.0}


async def test_the_text_of_a_failure_has_type_and_line_also_in_an_installed_package(
    episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_core.errors._INSTALLED", (str(Path(__file__).parent),))
    _, [error] = await score(episode, [ScoringRule("bad", raising(LookupError()))], SCORE)
    line = rf"{re.escape(__file__)}:\d+: raise error"
    assert re.fullmatch(rf"The reward rule 'bad' failed on rollout r\. LookupError \({line}\)", failure_text(error))


async def test_the_table_of_endings_decides_before_any_rule(episode: Episode) -> None:
    rules = [ScoringRule("one", lambda e: 1.0)]
    late = replace(episode, ending=Ending.TIMED_OUT)
    fixed, _ = await score(late, rules, SCORE | {Ending.TIMED_OUT: -0.5})
    assert (fixed.terminal, fixed.rewards[0].source) == (-0.5, "endings")
    dropped, _ = await score(late, rules, SCORE | {Ending.TIMED_OUT: "drop"})
    assert dropped.dropped is DropReason.ENDING
    assert (await score(dropped, rules, SCORE))[0] is dropped
    assert (await score(late, rules, SCORE))[0].terminal == 1.0


def test_reported_sums_what_the_agent_said_and_is_silent_without(episode: Episode) -> None:
    rewards = [("a", 0.25, "agent"), ("b", 0.5, "agent"), ("c", 9.0, "rule")]
    [said] = reported(replace(episode, rewards=tuple(Reward("r", 0, *reward) for reward in rewards)))
    assert (said.name, said.value, said.call) == ("reported", 0.75, None)
    assert reported(episode) == []


class TestGroupRules:
    """Rules that see all episodes of a group at once."""

    @pytest.fixture
    def group(self, episode: Episode) -> list[Episode]:
        def member(number: int) -> Episode:
            name = f"r{number}"
            calls = tuple(replace(t, key=t.key._replace(rollout=name)) for t in episode.transitions)
            return replace(episode, rollout=name, member=number, result="x" * number, transitions=calls)

        return [member(number) for number in range(3)]

    @staticmethod
    async def scored(episodes: list[Episode], *rules: ScoringRule, endings: Any = SCORE) -> list[Any]:
        return await score_groups(await score_all(episodes, rules, endings), rules, endings)

    async def test_each_group_is_seen_whole_after_the_other_rules_with_provenance(self, group: list[Episode]) -> None:
        seen: list[tuple[float | None, ...]] = []

        async def ranks(episodes: Sequence[Episode]) -> list[float]:
            seen.append(tuple(one.terminal for one in episodes))
            return [len(str(one.result)) / 2 for one in episodes]

        other = replace(group[0], rollout="r9", group="other", result="xxxx")
        rules = ScoringRule("ranks", GroupRewardRule(ranks), 0.5), ScoringRule("end", lambda e: float(e.member))
        scored = await self.scored([group[0], other, *group[1:]], *rules)

        assert sorted(seen) == [(0.0,), (0.0, 1.0, 2.0)]
        assert [(e.rollout, e.terminal) for e, _ in scored] == [("r0", 0.0), ("r9", 1.0), ("r1", 1.25), ("r2", 2.5)]
        last = {(r.name, r.value, r.source) for r in scored[3][0].rewards}
        assert last == {("end", 2.0, "end"), ("ranks", 1.0, "ranks")}
        assert all(errors == [] for _, errors in scored)

    async def test_any_form_of_a_value_is_taken(self, group: list[Episode]) -> None:
        def forms(episodes: Sequence[Episode]) -> list[RewardValue]:
            return [None, {"half": 0.5}, {episodes[2].transitions[0].key: 0.25}]

        scored = [e for e, _ in await self.scored(group, ScoringRule("forms", GroupRewardRule(forms)))]
        assert [e.terminal for e in scored] == [0.0, 0.5, 0.0]
        assert [r.name for r in scored[1].rewards] == ["forms.half"]
        assert scored[2].transitions[0].reward == 0.25

    async def test_what_is_dropped_or_has_a_fixed_reward_is_not_compared(self, group: list[Episode]) -> None:
        seen: list[str] = []

        def watch(episodes: Sequence[Episode]) -> list[float]:
            seen.extend(one.rollout for one in episodes)
            return [1.0] * len(episodes)

        group = [replace(group[0], ending=Ending.TIMED_OUT), replace(group[1], dropped=DropReason.PLUGIN), group[2]]
        rule = ScoringRule("watch", GroupRewardRule(watch))
        scored = await self.scored(group, rule, endings=SCORE | {Ending.TIMED_OUT: -0.5})
        assert seen == ["r2"]
        assert [e.terminal for e, _ in scored] == [-0.5, 0.0, 1.0]

    @pytest.mark.parametrize(
        ("rule", "problem", "dropped"),
        [
            (lambda episodes: 1 / 0, "division", [DropReason.REWARD_FAILED] * 3),
            (lambda episodes: [1.0], "it gave 1 values for 3 episodes", [DropReason.REWARD_FAILED] * 3),
            (lambda episodes: [1.0, math.inf, 2.0], "inf", [None, DropReason.NON_FINITE, None]),
            (lambda episodes: [1.0, "x", 2.0], "no number", [None, DropReason.REWARD_FAILED, None]),
        ],
    )
    async def test_one_that_fails_is_reported_once_and_drops_what_it_fails_on_unless_it_only_measures(
        self, group: list[Episode], rule: Any, problem: str, dropped: list[DropReason | None]
    ) -> None:
        end = ScoringRule("end", lambda e: 1.0)
        scored = await self.scored(group, ScoringRule("bad", GroupRewardRule(rule)), end)
        assert [e.dropped for e, _ in scored] == dropped
        [error] = {error for _, errors in scored for error in errors}
        assert all(errors for one, errors in scored if one.dropped), "each says why"
        assert problem in str(error)
        [note] = error.__notes__
        assert note.startswith("The reward rule 'bad' failed on rollout r")
        scored = await self.scored(group, ScoringRule("bad", GroupRewardRule(rule), 0.0), end)
        assert [e.dropped for e, _ in scored] == [None] * 3
        assert len({error for _, errors in scored for error in errors}) == 1


def loops(_: Episode) -> float:
    while True:
        pass


async def computes(_: Episode) -> float:
    while True:
        pass


async def waits(_: Episode) -> float:
    await asyncio.Event().wait()
    return 1.0


def cannot_be_interrupted(_: object) -> Any:
    threading.Event().wait()


@pytest.mark.parametrize(
    "rule", [loops, computes, waits, cannot_be_interrupted, GroupRewardRule(cannot_be_interrupted)]
)
async def test_a_rule_that_never_returns_costs_its_own_time_alone(rule: Any, episode: Episode) -> None:
    """The event loop and the other rules go on."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def quick(_: Episode) -> float:
        return 2.0

    ticking = asyncio.create_task(tick())
    rules = [ScoringRule("slow", rule, time_limit=0.3)]
    [(scored, [error])] = await score_groups(await score_all([episode], rules, SCORE), rules, SCORE)
    ticking.cancel()
    assert scored.dropped is DropReason.REWARD_FAILED
    assert "longer than 0.3 seconds" in str(error)
    assert ticks >= 3
    after = [ScoringRule("f", lambda e: 1.0), ScoringRule("g", quick)]
    assert (await score(episode, after, SCORE))[0].terminal == 3.0
    debugged = threading.Thread(target=call_while_traced, daemon=True)
    debugged.start()
    await asyncio.to_thread(debugged.join, 10)
    assert not debugged.is_alive()


def call_while_traced() -> None:
    """Call a function as debuggers, coverage and hypothesis do."""
    sys.settrace(lambda *_: None)
    str(threading.current_thread())
