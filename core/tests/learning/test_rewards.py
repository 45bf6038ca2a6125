"""Reward rules over episodes."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agl_core.builtin.credit import identical
from agl_core.learning import ScoringRule, build_episode, score, score_all, score_groups
from agl_core.learning.rewards import reported
from agl_core.protocols import GroupRewardRule, RewardValue
from agl_core.types import DropReason, Ending, Episode, Reward, TransitionKey

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


async def test_a_mapping_may_name_transitions_and_components(episode: Episode) -> None:
    def mixed(e: Episode) -> dict[str | TransitionKey, float]:
        return {"answer": 1.0, e.transitions[1].key: 0.5}

    scored, errors = await score(episode, [ScoringRule("mixed", mixed, 0.5)], SCORE)
    assert errors == []
    assert scored.terminal == 0.5
    assert [r.name for r in scored.rewards] == ["mixed.answer"]
    assert [t.reward for t in scored.transitions] == [0.0, 0.25]
    assert [(r.name, r.source) for r in scored.transitions[1].rewards] == [("mixed", "mixed")]


async def test_a_transition_of_another_episode_cannot_be_rewarded(episode: Episode) -> None:
    key = episode.transitions[0].key._replace(call="elsewhere")
    scored, [error] = await score(episode, [ScoringRule("lost", lambda e: {key: 1.0})], SCORE)
    assert scored.dropped is DropReason.REWARD_FAILED
    assert "which the episode does not have" in str(error)


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
            seen.append(tuple(each.terminal for each in episodes))
            return [len(str(each.result)) / 2 for each in episodes]

        other = replace(group[0], rollout="r9", group="other", result="xxxx")
        rules = ScoringRule("ranks", GroupRewardRule(ranks), 0.5), ScoringRule("end", lambda e: float(e.member))
        found = await self.scored([group[0], other, *group[1:]], *rules)

        assert sorted(seen) == [(0.0,), (0.0, 1.0, 2.0)]
        assert [(e.rollout, e.terminal) for e, _ in found] == [("r0", 0.0), ("r9", 1.0), ("r1", 1.25), ("r2", 2.5)]
        assert {(r.name, r.value, r.source) for r in found[3][0].rewards} == {
            ("end", 2.0, "end"),
            ("ranks", 1.0, "ranks"),
        }
        assert all(errors == [] for _, errors in found)

    async def test_any_form_of_a_value_is_taken(self, group: list[Episode]) -> None:
        def forms(episodes: Sequence[Episode]) -> list[RewardValue]:
            return [None, {"half": 0.5}, {episodes[2].transitions[0].key: 0.25}]

        found = [e for e, _ in await self.scored(group, ScoringRule("forms", GroupRewardRule(forms)))]
        assert [e.terminal for e in found] == [0.0, 0.5, 0.0]
        assert [r.name for r in found[1].rewards] == ["forms.half"]
        assert found[2].transitions[0].reward == 0.25

    async def test_what_is_dropped_or_has_a_fixed_reward_is_not_compared(self, group: list[Episode]) -> None:
        seen: list[str] = []

        def watch(episodes: Sequence[Episode]) -> list[float]:
            seen.extend(each.rollout for each in episodes)
            return [1.0] * len(episodes)

        group = [replace(group[0], ending=Ending.TIMED_OUT), replace(group[1], dropped=DropReason.PLUGIN), group[2]]
        found = await self.scored(
            group, ScoringRule("watch", GroupRewardRule(watch)), endings=SCORE | {Ending.TIMED_OUT: -0.5}
        )
        assert seen == ["r2"]
        assert [e.terminal for e, _ in found] == [-0.5, 0.0, 1.0]

    @pytest.mark.parametrize(
        ("rule", "said"),
        [(lambda episodes: 1 / 0, "division"), (lambda episodes: [1.0], "it gave 1 values for 3 episodes")],
    )
    async def test_one_that_fails_drops_the_group_and_is_reported_once(
        self, group: list[Episode], rule: Any, said: str
    ) -> None:
        found = await self.scored(group, ScoringRule("bad", GroupRewardRule(rule)), ScoringRule("end", lambda e: 1.0))
        assert [(e.dropped, e.terminal) for e, _ in found] == [(DropReason.REWARD_FAILED, None)] * 3
        [error] = [error for _, errors in found for error in errors]
        assert said in str(error)
        assert error.__notes__ == ["The reward rule 'bad' failed on rollout r0."]

    async def test_one_of_weight_0_drops_nothing(self, group: list[Episode]) -> None:
        found = await self.scored(group, ScoringRule("bad", GroupRewardRule(lambda episodes: []), 0.0))
        assert [e.dropped for e, _ in found] == [None] * 3
        assert len([error for _, errors in found for error in errors]) == 1

    async def test_a_value_that_is_not_finite_drops_its_episode(self, group: list[Episode]) -> None:
        found = await self.scored(group, ScoringRule("bad", GroupRewardRule(lambda episodes: [1.0, math.inf, 2.0])))
        assert [e.dropped for e, _ in found] == [None, DropReason.NON_FINITE, None]


@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_a_reward_that_is_not_finite_drops_the_episode(episode: Episode, value: float) -> None:
    scored, [error] = await score(episode, [ScoringRule("bad", lambda e: value)], SCORE)
    assert scored.dropped is DropReason.NON_FINITE
    assert str(value) in str(error)
    assert error.__notes__ == ["The reward rule 'bad' failed on rollout r."]


@pytest.mark.parametrize("value", ["0.5", "yes", b"1", [1.0], [["a", 1]], {"part": "high"}, object(), {"a": {}}])
async def test_what_is_no_number_is_told_with_rule_and_rollout(episode: Episode, value: Any) -> None:
    scored, [error] = await score(episode, [ScoringRule("bad", lambda e: value)], SCORE)
    assert scored.dropped is DropReason.REWARD_FAILED
    wrong = next(iter(value.values())) if isinstance(value, dict) else value
    assert f"it gave {wrong!r}, which is no number" in str(error)
    assert error.__notes__ == ["The reward rule 'bad' failed on rollout r."]


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


class TestTimeLimits:
    """A rule that never returns costs its own time: neither the event loop's nor that of the others."""

    @staticmethod
    async def timed_out(rule: Any, episode: Episode) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        scored, [error] = await score(episode, [ScoringRule("slow", rule, time_limit=0.3)], SCORE)
        ticking.cancel()
        assert scored.dropped is DropReason.REWARD_FAILED
        assert "longer than 0.3 seconds" in str(error)
        assert ticks >= 3
        after = [ScoringRule("f", lambda e: 1.0), ScoringRule("g", quick)]
        assert (await score(episode, after, SCORE))[0].terminal == 3.0

    async def test_of_a_loop_without_end(self, episode: Episode) -> None:
        def endless(_: Episode) -> float:
            while True:
                pass

        await self.timed_out(endless, episode)

    async def test_of_an_async_rule_that_computes(self, episode: Episode) -> None:
        async def endless(_: Episode) -> float:
            while True:
                pass

        await self.timed_out(endless, episode)

    async def test_of_an_async_rule_that_waits(self, episode: Episode) -> None:
        async def waits(_: Episode) -> float:
            await asyncio.Event().wait()
            return 1.0

        await self.timed_out(waits, episode)

    async def test_of_a_call_that_cannot_be_interrupted(self, episode: Episode) -> None:
        await self.timed_out(lambda e: threading.Event().wait(), episode)

    async def test_of_a_rule_that_compares(self, episode: Episode) -> None:
        rules = [ScoringRule("slow", GroupRewardRule(lambda e: threading.Event().wait()), time_limit=0.1)]
        [(scored, [error])] = await score_groups(await score_all([episode], rules, SCORE), rules, SCORE)
        assert scored.dropped is DropReason.REWARD_FAILED
        assert "longer than 0.1 seconds" in str(error)


async def quick(_: Episode) -> float:
    return 2.0


async def test_a_rule_that_would_end_the_process_only_fails(episode: Episode) -> None:
    scored, [error] = await score(episode, [ScoringRule("ends", lambda e: sys.exit(1))], SCORE)
    assert (scored.dropped, str(error)) == (DropReason.REWARD_FAILED, "it raised SystemExit")


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
