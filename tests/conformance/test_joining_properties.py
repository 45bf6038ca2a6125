"""Generated traces, recorded in a real store: no call is lost, none doubled, none attributed to the wrong agent."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_core.learning import build_episode
from agl_core.store.sqlite import SqliteStore
from agl_core.types import Attempt, Call, Choice, Ending, FinishReason, Mode, Rollout, Task, ToolResult, ToolStatus

SAID = {
    ToolStatus.OK: "22 °C",
    ToolStatus.ERROR: "ValueError: no such town",
    ToolStatus.TIMEOUT: "TimeoutError: timed out",
    ToolStatus.EMPTY: "",
}
"""What a `tool` message says when a tool ends so."""


@dataclass(frozen=True)
class ToolPlan:
    """A tool that a response asks for, and how it is told what became of it."""

    status: ToolStatus
    reported: int
    """How often an adapter reports it: not at all, once, or twice the same."""
    echoed: int | None
    """Which of the later requests of the attempt repeats it; None: the context was compacted before."""


@dataclass(frozen=True)
class CallPlan:
    agent: str | None
    span: str | None
    prompt: str
    choices: tuple[tuple[ToolPlan, ...], ...]
    without_id: bool
    """An adapter reports a tool that ran below `span`, without an id."""
    recorded: int
    """How often the same record is written."""
    late: bool


TOOLS = st.builds(ToolPlan, st.sampled_from(list(ToolStatus)), st.integers(0, 2), st.none() | st.integers(0, 3))
CALLS = st.builds(
    CallPlan,
    agent=st.sampled_from([None, "alice", "bob", "carol"]),
    span=st.sampled_from([None, "shared", "own"]),
    prompt=st.sampled_from(["one prompt", "another prompt"]),
    choices=st.lists(st.lists(TOOLS, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple),
    without_id=st.booleans(),
    recorded=st.integers(1, 2),
    late=st.sampled_from([False, False, False, True]),
)


@dataclass
class Trace:
    """The records of a plan, and what must come of them, as far as the generator knows by itself."""

    rollout: str
    calls: list[Call] = field(default_factory=list)
    tool_results: list[ToolResult] = field(default_factory=list)
    expected: list[tuple[Any, ...]] = field(default_factory=list)
    """(call, choice, agent, turn, the agent's turn, prompt, response ids, tool results) by transition, in order."""
    unjoined: Counter[str] = field(default_factory=Counter)


def trace_of(plans: list[CallPlan], rollout: str) -> Trace:
    trace, numbers, ids = Trace(rollout), itertools.count(), itertools.count(1)
    counted = [place for place, plan in enumerate(plans) if not plan.late]
    told: dict[int, list[dict[str, Any]]] = {}
    owners = Counter(plan.span for plan in plans if plan.span == "shared" for _ in plan.choices)
    turns: Counter[str | None] = Counter()
    made = []
    for place, plan in enumerate(plans):
        span = f"span-{place}" if plan.span == "own" else plan.span
        alone = not plan.late and len(plan.choices) == 1 and (plan.span == "own" or owners[span] == 1)
        joins = plan.without_id and span is not None and alone
        choices, transitions = [], []
        for index, tools in enumerate(plan.choices):
            response = np.array([next(ids), next(ids)], np.int32)
            asked, joined = [], []
            for tool in tools:
                tool_call_id = f"call_{next(numbers)}"
                asked.append({"id": tool_call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}})
                tool_result = ToolResult(
                    f"report-{tool_call_id}", rollout, 0, "f", tool.status, tool_call_id, agent=plan.agent
                )
                trace.tool_results += [tool_result] * tool.reported
                later = [each for each in counted if each > place]
                echoed = tool.echoed is not None and later and not plan.late
                if echoed:
                    carrier = later[tool.echoed % len(later)]
                    message = {"role": "tool", "tool_call_id": tool_call_id, "content": SAID[tool.status]}
                    told.setdefault(carrier, []).append(message)
                if plan.late:
                    trace.unjoined.update([tool_result.id] if tool.reported else [])
                elif tool.reported or (echoed and not joins):
                    joined.append((tool_call_id, tool.status))
            message = {"role": "assistant", "content": None if asked else "done", "tool_calls": asked or None}
            choices.append(Choice(index, message, FinishReason.STOP, response, np.zeros(2, np.float32)))
            if joins:
                joined.append((None, ToolStatus.OK))
            transitions.append((index, response.tolist(), joined))
        if plan.without_id:
            tool_result = ToolResult(
                f"span-{place}", rollout, 0, "g", ToolStatus.OK, parent_span=span, agent=plan.agent
            )
            trace.tool_results.append(tool_result)
            trace.unjoined.update([] if joins else [tool_result.id])
        made.append((plan, span, tuple(choices)))
        if not plan.late:
            turn = len({each[0] for each in trace.expected})
            trace.expected += [
                (f"call-{place}", index, plan.agent, turn, turns[plan.agent], plan.prompt, response, joined)
                for index, response, joined in transitions
            ]
            turns[plan.agent] += 1
    for place, (plan, span, choices) in enumerate(made):
        messages = [{"role": "user", "content": plan.prompt}, *told.get(place, ())]
        trace.calls += [_call(f"call-{place}", rollout, place, messages, choices, plan, span)] * plan.recorded
    return trace


def _call(
    id: str,
    rollout: str,
    sequence: int,
    messages: list[dict[str, Any]],
    choices: tuple[Choice, ...],
    plan: CallPlan,
    span: str | None,
) -> Call:
    return Call(
        id,
        rollout,
        0,
        sequence,
        "default",
        1,
        {"model": "default", "messages": messages},
        choices,
        0.0,
        1.0,
        agent=plan.agent,
        parent_span=span,
        prompt_ids=np.array(list(plan.prompt.encode()), np.int32),
        late=plan.late,
    )


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def store(loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteStore]:
    store = SqliteStore(Path(tmp_path_factory.mktemp("traces")) / "store.sqlite")
    loop.run_until_complete(store.open())
    yield store
    loop.run_until_complete(store.close())


ROLLOUTS = (f"r{number}" for number in itertools.count())


@settings(max_examples=2 * settings.default.max_examples)
@given(st.lists(CALLS, max_size=6), st.lists(CALLS, max_size=3), st.randoms(use_true_random=False))
def test_no_call_is_lost_doubled_or_misattributed(
    store: SqliteStore, loop: asyncio.AbstractEventLoop, plans: list[CallPlan], others: list[CallPlan], order: Any
) -> None:
    trace, beside = trace_of(plans, next(ROLLOUTS)), trace_of(others, next(ROLLOUTS))
    rollouts = [
        Rollout(each.rollout, "run", 0, "group", Task("t", "?"), Mode.TRAIN, step=0, member=0)
        for each in (trace, beside)
    ]
    attempts = [Attempt(each.rollout, 0, "worker", 0.0, ending=Ending.FINISHED) for each in (trace, beside)]
    records = [*trace.calls, *trace.tool_results, *beside.calls, *beside.tool_results]
    order.shuffle(records)

    async def through_the_store() -> Any:
        await store.put(*rollouts, *attempts)
        await asyncio.gather(*(store.put(*records[part::3]) for part in range(3)))
        calls = await store.calls([each.key for each in attempts])
        tool_results = await store.tool_results([attempts[0].key])
        order.shuffle(calls)
        order.shuffle(tool_results)
        return build_episode(rollouts[0], attempts[0], calls, tool_results)

    episode = loop.run_until_complete(through_the_store())
    for transition, expected in itertools.zip_longest(episode.transitions, trace.expected):
        assert transition is not None, f"lost: {expected}"
        assert expected is not None, f"one too many: {transition}"
        call, choice, agent, turn, agent_turn, prompt, response, joined = expected
        assert (transition.key.rollout, transition.key.call, transition.key.choice) == (trace.rollout, call, choice)
        assert (transition.agent, transition.turn, transition.agent_turn) == (agent, turn, agent_turn)
        assert bytes(transition.prompt_ids.tolist()).decode() == prompt
        assert transition.response_ids.tolist() == response
        found = [(tool_result.tool_call_id, tool_result.status) for tool_result in transition.tool_results]
        assert [each for each in found if each[0]] == [each for each in joined if each[0]]
        assert Counter(found) == Counter(joined)
    assert Counter(tool_result.id for tool_result in episode.unjoined) == trace.unjoined
