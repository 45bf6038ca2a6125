"""What the numbers of a step mean, worked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agl_core.hooks import hookimpl
from agl_core.plugins import Plugins
from agl_core.training.metrics import contrast_metrics, drop_metrics, episode_metrics, staleness_metrics
from agl_core.types import (
    DropReason,
    Ending,
    Episode,
    FinishReason,
    Reward,
    Rollout,
    ToolResult,
    ToolStatus,
    TransitionKey,
)

from .scripted_training import episode, make_bench


def told(id: str, status: ToolStatus = ToolStatus.OK) -> ToolResult:
    return ToolResult(id, "r", 0, "look", status)


def test_rewards_are_of_all_rollouts_and_one_without_counts_as_nothing() -> None:
    crashed = episode("b", (), dropped=DropReason.ENDING, ending=Ending.CRASHED)
    found = episode_metrics([episode("a", terminal=1.0), replace(crashed, terminal=None), episode("c", terminal=0.5)])
    assert (found["rollouts"], found["reward/mean"]) == (3, 0.5)
    assert found["reward/std"] == pytest.approx((1 / 6) ** 0.5)
    assert (found["ending/finished"], found["ending/crashed"]) == (2, 1)


def test_a_group_whose_rewards_differ_by_rounding_alone_has_no_contrast() -> None:
    groups = [[episode(terminal=each) for each in rewards] for rewards in ((0.3, 0.1 + 0.2), (0.3, 0.31), (0.0, 0.0))]
    assert contrast_metrics(groups) == {"groups/no_contrast": pytest.approx(2 / 3)}


def test_a_rules_reward_is_its_sum_over_the_rollouts() -> None:
    """Rewards of single calls add up; a rollout without one counts as 0."""
    parts = [Reward("a", 0, "tools", value, "tools", call) for value, call in ((0.25, "a-c0"), (-1.0, "a-c1"))]
    found = episode_metrics([replace(episode("a"), rewards=tuple(parts)), episode("b")])
    assert found["reward/tools"] == -0.375


def changed() -> Episode:
    """Three transitions of two calls: two choices of one, and a truncated one with a broken prefix."""
    first, last = episode("a", (0, 0)).transitions
    second = replace(first, key=TransitionKey("a", 0, first.key.call, 1), tool_results=(told("1"), told("2")))
    last = replace(last, finish_reason=FinishReason.LENGTH, prefix_broken=True, parse_error="no JSON", prompt_ids=None)
    return replace(episode("a"), transitions=(first, second, last), unjoined=(told("3"),))


def test_lengths_calls_and_tool_results_are_counted_by_transition_call_and_rollout() -> None:
    found = episode_metrics([changed(), episode("b", (0,))])
    assert (found["rollout/turns"], found["rollout/calls"], found["rollout/tool_results"]) == (2, 1.5, 1)
    assert (found["length/prompt"], found["length/response"]) == (2, 3), "a prompt without ids has no length"
    assert (found["length/truncated"], found["calls/prefix_broken"], found["calls/parse_errors"]) == (0.25, 1, 1)
    assert found["tool_results/unjoined"] == 1


def test_of_nothing_there_is_no_mean() -> None:
    assert episode_metrics([episode("a", (), terminal=0.0)]).keys().isdisjoint({"length/prompt", "length/truncated"})
    assert staleness_metrics([episode("a", ())], {"default": 3}) == {}
    assert "reward/mean" not in episode_metrics([])


def test_an_episode_is_as_old_as_its_oldest_call() -> None:
    episodes = [episode("a", (1, 3)), episode("b", (3, 3)), episode("c", (2,))]
    assert staleness_metrics(episodes, {"default": 3}) == {"staleness/mean": 1.0, "staleness/max": 2.0}


def test_drops_are_counted_by_reason() -> None:
    assert drop_metrics([None, "stale", "ending", "stale", None]) == {"dropped/stale": 2.0, "dropped/ending": 1.0}


async def test_a_steps_line_adds_up(tmp_path: Path) -> None:
    """Of two groups of two rollouts with two calls each, one rollout crashes before its first call."""
    bench = make_bench(tmp_path, steps=1, min_group_size=1)

    def ending(rollout: Rollout) -> Ending:
        return Ending.CRASHED if rollout.id == "s1-g1-m0" else Ending.FINISHED

    bench.collector.ending = ending
    await bench.trainer.train()

    [line] = bench.log.lines
    assert line["rollouts"] == line["ending/finished"] + line["ending/crashed"] == 4
    assert line["rollout/calls"] == 6 / 4
    assert line["transitions/kept"] + line["transitions/dropped"] == 6
    assert line["episodes_dropped/ending"] == 1
    assert line["seconds/rollouts"] + line["seconds/update"] <= line["seconds/step"]
    state = bench.trainer.state
    assert (state.kept, state.llm_calls) == (line["transitions/kept"], 6)
    assert (state.endings, state.train_rewards) == ({"finished": 3, "crashed": 1}, [line["reward/mean"]])


class FailingHook:
    """Raises in the first two updates."""

    def __init__(self) -> None:
        self.asked = 0

    @hookimpl
    def policy_updated(self) -> None:
        self.asked += 1
        if self.asked <= 2:
            raise RuntimeError("no disk")


async def test_failures_of_lifecycle_hooks_are_counted_by_step(tmp_path: Path) -> None:
    plugins = Plugins()
    plugins.register(FailingHook(), "a_plugin.py")
    bench = make_bench(tmp_path, plugins=plugins)

    await bench.trainer.train()

    assert bench.metric("hooks/failed") == [1.0, 1.0, 0.0, 0.0]
