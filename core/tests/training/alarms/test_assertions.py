"""A run that rests on what the agent's side alone asserts says so, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agl_core.training.alarms.rollouts import Assertions
from agl_core.training.progress import Silent
from agl_core.types import AlarmName, Episode, Reward, Source, ToolResult, ToolStatus

from ..scripted_training import episode, make_bench


def told(*sources: Source) -> Episode:
    """An episode with a tool result of each of these sources."""
    tool_results = tuple(ToolResult(s.value, "r", 0, "add", ToolStatus.OK, source=s) for s in sources)
    plain = episode()
    return replace(plain, transitions=(replace(plain.transitions[0], tool_results=tool_results),))


def reported() -> Episode:
    return replace(episode(), rewards=(Reward("r", 0, "own", 1.0, "agent"),))


@pytest.mark.parametrize("source", [Source.ADAPTER, Source.SPAN, Source.COMMAND])
def test_tool_results_that_count_and_that_only_the_agents_side_tells(source: Source) -> None:
    resting = Assertions(of_tool_results=True)
    assert list(resting.noticed([told(Source.CONVERSATION)])) == []
    [line] = resting.noticed([told(source, Source.CONVERSATION), told(source, source)])
    assert f"some of the 4 of this step were ({source} 3)" in line.seen
    assert "docs/security.md" in line.remedy
    assert list(resting.noticed([told(source)])) == []


def test_tool_results_that_do_not_count_and_steps_without_any() -> None:
    assert list(Assertions().noticed([told(Source.SPAN), reported()])) == []
    assert list(Assertions(of_tool_results=True, of_rewards=True).noticed([told()])) == []


def test_a_reward_that_the_agent_alone_reports() -> None:
    resting = Assertions(of_rewards=True)
    [line] = resting.noticed([reported()])
    assert "no rule in [rewards] has a weight" in line.seen
    assert list(resting.noticed([reported()])) == []


async def test_training_says_it_once(tmp_path: Path) -> None:
    lines: list[str] = []

    class Said(Silent):
        def say(self, text: str) -> None:
            lines.append(text)

    bench = make_bench(tmp_path, steps=3)
    bench.collector.reports = True
    await replace(bench.trainer, observer=Said(), assertions=Assertions(of_rewards=True)).train()
    assert [line.partition(":")[0] for line in lines if "update" not in line] == ["step 1"]
    assert [alarm.name for alarm in bench.log.alarms] == [AlarmName.ASSERTED_REWARDS]
    assert bench.log.lines[0]["alarm/asserted_rewards"] == 1.0
    assert "alarm/asserted_rewards" not in bench.log.lines[1]
