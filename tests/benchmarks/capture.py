"""How much of what an agent does is captured, and what an adapter's tool results add to what the conversation shows.

`make bench-capture` plays the scenarios of tests/conformance, counts, and writes the table of docs/frameworks.md.
`python -m tests.benchmarks.capture MODULE:CLASS` plays one driver, in an environment of its framework.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agl_core.learning.transitions import build_episode
from agl_core.types import ToolResult, Transition

from ..conformance.driver import CHAT, Cell, Driver, Turn
from ..conformance.playing import Performed, running_bench, tokens
from ..conformance.scenarios import cells, turns
from ..support.testing_aids import fast_clients

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
SHARES = dict.fromkeys(("calls", "exact tokens", "names"), "calls expected")
SHARES |= dict.fromkeys(("joins", "status"), "results expected")
WRONG = ("false joins", "extra")
ADDED = ("reported", "not shown", "other status", "other result")


async def score(cell: Cell, performed: Performed) -> Counter[str]:
    """Count what was recorded of one rollout, beside what its script expects."""
    counts, untaken = Counter[str](), list(performed.episode.transitions)
    for turn in turns(cell.scenario):
        counts["results expected"] += len(turn.tool_results)
        for choice in range(turn.choices):
            counts["calls expected"] += 1
            transition = _taken(untaken, turn, tokens(turn.reply, choice))
            if transition is not None:
                counts += _of_call(turn, transition)
    counts["extra"] += len(untaken)
    counts["false joins"] += sum(len(t.tool_results) for t in untaken) + len(performed.episode.unjoined)
    return counts + await _added_by_adapter(performed)


def _taken(transitions: list[Transition], turn: Turn, ids: Sequence[int]) -> Transition | None:
    """The transition of a turn, which is then no longer left: of several with the same reply, that of its agent."""
    alike = [t for t in transitions if t.response_ids is not None and t.response_ids.tolist() == ids]
    alike.sort(key=lambda t: (t.agent != turn.agent, t.agent_turn != turn.number))
    for transition in alike[:1]:
        transitions.remove(transition)
    return next(iter(alike), None)


def _of_call(turn: Turn, transition: Transition) -> Counter[str]:
    joined = Counter((result.tool, str(result.status)) for result in transition.tool_results)
    tools = Counter(tool for tool, _ in turn.tool_results) & Counter(result.tool for result in transition.tool_results)
    prompt = b"" if transition.prompt_ids is None else bytes(transition.prompt_ids.tolist())
    return Counter(
        {
            "calls": 1,
            "exact tokens": int(f"You are {turn.agent}.".encode() in prompt),
            "names": int(transition.agent == turn.agent),
            "joins": tools.total(),
            "status": (joined & Counter(turn.tool_results)).total(),
            "false joins": joined.total() - tools.total(),
        }
    )


async def _added_by_adapter(performed: Performed) -> Counter[str]:
    """Of the tool results that an adapter reported, how many the conversation alone shows otherwise, or not at all."""
    key, store = performed.attempt.key, performed.attempt.stack.store
    (attempt,) = await store.attempts(key.rollout)
    by_conversation = build_episode(await store.rollout(key.rollout), attempt, performed.calls, [])
    shown = {(t.key, result.tool_call_id): result for t in by_conversation.transitions for result in t.tool_results}
    counts = Counter[str]()
    for transition in performed.episode.transitions:
        for seen in (t for t in transition.tool_results if t.adapter):
            alone = shown.get((transition.key, seen.tool_call_id))
            counts["reported"] += 1
            counts["not shown"] += alone is None
            counts["other status"] += alone is not None and alone.status is not seen.status
            counts["other result"] += alone is not None and alone.status is seen.status and _text(alone) != _text(seen)
    return counts


def _text(tool_result: ToolResult) -> str:
    result = tool_result.result
    return tool_result.error or (result if isinstance(result, str) else json.dumps(result))


async def play(driver: Driver) -> str:
    """The row of a driver: its chat completions in its first form, except for its gaps."""
    counts, played = Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder, fast_clients():
        async with running_bench(Path(folder)) as bench:
            for cell in cells([driver]):
                if cell.gap is None and (cell.api, cell.form) == (CHAT, driver.forms[0]):
                    played += 1
                    for performed in (await bench.perform(cell))[1]:
                        counts += await score(cell, performed)
    expected = {name: counts[whole] for name, whole in SHARES.items()} | dict.fromkeys(WRONG, 0)
    recorded = {name: counts[name] for name in expected}
    assert recorded == expected, f"The page says that all is recorded, and nothing added: {driver.name}, {recorded}"
    return f"| {driver.name} | {played} | {' | '.join(str(counts[name]) for name in ADDED)} |"


def main() -> None:
    """Play the driver that is named, or agl's own, and put their rows into the page."""
    module, _, name = (sys.argv[1:] or ["tests.conformance.drivers:DRIVERS"])[0].partition(":")
    named: Any = getattr(importlib.import_module(module), name)
    for driver in named if isinstance(named, tuple) else (named(),):
        row, text = asyncio.run(play(driver)), PAGE.read_text()
        print(row)
        PAGE.write_text(re.sub(rf"^\| {re.escape(driver.name)} \|.*$", row, text, flags=re.MULTILINE))


if __name__ == "__main__":
    main()
