"""A run that rests on what the agent's side alone asserts says so, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agl_core.training.alarms.rollouts import asserted_rewards, asserted_tool_results
from agl_core.training.progress import Silent
from agl_core.types import AlarmName, Episode, Source, ToolResult, ToolStatus

from ..scripted_training import episode, make_bench


def told(*sources: Source) -> Episode:
    """An episode with a tool result of each of these sources."""
    tool_results = tuple(ToolResult(s.value, "r", 0, "add", ToolStatus.OK, source=s) for s in sources)
    plain = episode()
    return replace(plain, transitions=(replace(plain.transitions[0], tool_results=tool_results),))


@pytest.mark.parametrize("source", [Source.ADAPTER, Source.SPAN, Source.COMMAND])
def test_tool_results_that_only_the_agents_side_tells(source: Source) -> None:
    assert asserted_tool_results([told(), told(Source.CONVERSATION)]) is None
    seen = asserted_tool_results([told(source, Source.CONVERSATION), told(source, source)])
    assert f"some of the 4 of this step were ({source} 3)" in str(seen)


async def test_training_says_it_once(tmp_path: Path) -> None:
    lines: list[str] = []

    class Said(Silent):
        def say(self, text: str) -> None:
            lines.append(text)

    bench = make_bench(tmp_path, steps=3)
    bench.collector.reports = True
    await replace(bench.trainer, observer=Said(), assertions=[asserted_tool_results, asserted_rewards]).train()
    assert [line.partition(":")[0] for line in lines if "update" not in line] == ["step 1"]
    assert [alarm.name for alarm in bench.log.alarms] == [AlarmName.ASSERTED_REWARDS]
    assert bench.log.lines[0]["alarm/asserted_rewards"] == 1.0
    assert "alarm/asserted_rewards" not in bench.log.lines[1]
