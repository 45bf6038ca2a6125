"""Calls that command-line agents make for themselves are told from their work, and nobody else's are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agl_core.builtin import identical
from agl_core.learning.batch import BatchPlan, PolicyCredit, make_batches
from agl_core.testing import episodes as make
from agl_core.types import Call, CreditKind, DropReason, Episode, Housekeeping, LineageKind, RecordedRollout
from agl_server.training.lineages import places_of
from agl_server.training.rollouts import trained_episode

from .program_sessions import PROGRAMS, Session, message, sessions, tools


def test_housekeeping_of_six_programs_is_told_from_their_work() -> None:
    labels = Counter[tuple[str, bool, bool]]()
    for session in sessions(each=40):
        for own, place in zip(session.own, places_of(session.calls), strict=True):
            labels[session.program, own, place.housekeeping is not None] += 1
    for program in PROGRAMS:
        true, false = labels[program, True, True], labels[program, False, True]
        missed = labels[program, True, False]
        assert false <= 0.01 * (true + false), f"{program}: {false} of {true + false} labels are wrong"
        assert missed <= 0.05 * (true + missed), f"{program}: {missed} of {true + missed} are missed"
    assert labels.total() > 2000


def unmarked(session: Session) -> list[Call]:
    """Its calls as a newer version would make them, whose words agl does not know."""
    return [replace(call, housekeeping=None) for call in session.calls]


def test_without_their_words_structure_tells_what_has_no_tools_and_nothing_came_of_and_no_work() -> None:
    labels = Counter[tuple[bool, Housekeeping | None]]()
    for session in sessions(each=40):
        for own, place in zip(session.own, places_of(unmarked(session)), strict=True):
            labels[own, place.housekeeping] += 1
    assert labels[False, Housekeeping.STRUCTURE] == 0
    assert labels[True, Housekeeping.STRUCTURE] > 80, "titles of Claude Code, opencode and Codex, and quota probes"


def planner_and_worker(**fields: Any) -> list[Call]:
    """An ordinary program of two agents: one plans without tools, one works with them."""
    plan = [message("system", "You plan."), message("user", "Repair the shop.")]
    work = [message("system", "You work."), message("user", "Repair the shop.")]
    called = {"id": "t", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = message("assistant", None, tool_calls=[called])
    told = message("tool", "a shop", tool_call_id="t")
    return [
        make.call(0, make.choice(message=message("assistant", "1. Look.")), request={"messages": plan}, **fields),
        make.call(1, make.choice(message=asked), request={"messages": work, "tools": tools("look")}, **fields),
        make.call(2, request={"messages": [*work, asked, told], "tools": tools("look")}, **fields),
        make.call(3, make.choice(message=message("assistant", "Yes.")), request={"messages": plan}, **fields),
    ]


@pytest.mark.parametrize("names", [[None] * 4, ["planner", "worker", "worker", "planner"]])
def test_a_planner_without_tools_beside_a_worker_is_no_housekeeping(names: list[str | None]) -> None:
    calls = [replace(call, agent=name) for call, name in zip(planner_and_worker(), names, strict=True)]
    assert {place.housekeeping for place in places_of(calls)} == {None}
    named = [replace(call, program="claude", agent=name or "planner") for call, name in zip(calls, names, strict=True)]
    assert {place.housekeeping for place in places_of(named)} == {None}, "an adapter names its agents"


def test_what_is_used_later_or_is_the_result_is_no_housekeeping() -> None:
    calls = [replace(call, program="claude") for call in planner_and_worker()]
    assert [place.housekeeping is not None for place in places_of([*calls[:3]])] == [True, False, False]
    assert [place.housekeeping for place in places_of(calls[:3], {"text": "1. Look."})] == [None] * 3
    request = {**calls[2].request, "messages": [*calls[2].request["messages"], message("user", "1. Look.")]}
    assert [p.housekeeping for p in places_of([*calls[:2], replace(calls[2], request=request)])] == [None] * 3


def test_an_agent_named_housekeeping_is_and_so_it_was_recorded_once() -> None:
    [place] = places_of([make.call(0, agent="housekeeping")])
    assert place.housekeeping is Housekeeping.SETTING


@pytest.mark.parametrize("program", ["claude", "codex", "opencode", "qwen", "aider"])
def test_the_tree_of_each_program(program: str) -> None:
    """The calls of a conversation follow each other, and every other one has the parent that started it."""
    expected = {
        "claude": {LineageKind.SUB_AGENT: 1, LineageKind.COMPACTION: 2},
        "codex": {LineageKind.SUB_AGENT: 1, LineageKind.COMPACTION: 1},
        "opencode": {LineageKind.SUB_AGENT: 1, LineageKind.COMPACTION: 2},
        "qwen": {LineageKind.COMPACTION: 2},
        "aider": {LineageKind.COMPACTION: 2},
    }
    kinds = Counter[tuple[tuple[LineageKind, int], ...]]()
    for session in sessions(each=40):
        if session.program != program:
            continue
        places = [place for place in places_of(session.calls) if place.housekeeping is None]
        ids = {call.id for call in session.calls}
        lineages = {place.lineage.number: place.lineage for place in places}
        assert all((lineage.parent in ids) == (lineage.kind is not LineageKind.MAIN) for lineage in lineages.values())
        turn_of = {call.id: turn for turn, call in enumerate(session.calls)}
        for lineage in lineages.values():
            started = [turn_of[lineage.parent]] if lineage.kind is LineageKind.SUB_AGENT else []
            assert [start for start, _ in lineage.thread] == started, "compactions go on"
        for number in lineages:
            turns = [place.agent_turn for place in places if place.lineage.number == number]
            assert turns == list(range(len(turns)))
        kinds[tuple(sorted(Counter(lineage.kind for lineage in lineages.values()).items()))] += 1
    longest = max(kinds, key=len)
    assert dict(longest) == {LineageKind.MAIN: 1, **expected[program]}
    assert len(kinds) <= 2, "with compaction, and without"


def test_a_sub_agent_that_nothing_comes_after_goes_on_in_the_thread_of_its_parent() -> None:
    work = [message("system", "You work."), message("user", "Repair the shop.")]
    called = {"id": "t", "type": "function", "function": {"name": "ask", "arguments": '{"prompt": "Look for it."}'}}
    asked = message("assistant", None, tool_calls=[called])
    below = [message("system", "You look."), message("user", "Look for it.")]
    told = message("tool", "in the till", tool_call_id="t")
    calls = [
        make.call(0, make.choice(message=asked), request={"messages": work, "tools": tools("ask")}),
        make.call(1, make.choice(message=message("assistant", "in the till")), request={"messages": below}),
        make.call(2, request={"messages": [*work, asked, told], "tools": tools("ask")}),
    ]
    assert [place.lineage.thread for place in places_of(calls)] == [(), ((0, 1),), ()]
    ended = places_of(calls[:2])
    assert [(place.lineage.kind, place.lineage.thread) for place in ended] == [
        (LineageKind.MAIN, ()), (LineageKind.SUB_AGENT, ()),
    ]  # fmt: skip


@pytest.mark.parametrize("housekeeping", ["drop", "keep"])
def test_no_rule_sees_housekeeping_and_none_is_trained_on_unless_it_is_kept(housekeeping: Any) -> None:
    session = next(session for session in sessions(each=1) if session.program == "opencode")
    members = [
        RecordedRollout(
            make.rollout(name),
            make.attempt(name),
            [replace(call, rollout=name, id=f"{name}-{call.sequence}") for call in session.calls],
            (),
            (),
        )
        for name in ("a", "b")
    ]
    episodes = [replace(trained_episode(m, housekeeping), terminal=n) for n, m in enumerate(members)]
    seen = list[int]()

    def rule(group: Sequence[Episode]) -> list[list[float]]:
        seen.extend(len(episode.transitions) for episode in group)
        return identical(group)

    plan = BatchPlan({"default": PolicyCredit("counting", rule, CreditKind.RETURN)})
    made = make_batches([episodes], plan)
    own, work = sum(session.own), len(session.own) - sum(session.own)
    dropped = Counter(record.dropped for record in made.dropped)
    if housekeeping == "drop":
        assert (seen, dropped) == ([work] * 2, {DropReason.HOUSEKEEPING: 2 * own})
        assert len(made.batches["default"]) == 2 * work
    else:
        assert (seen, dropped, len(made.batches["default"])) == ([work + own] * 2, {}, 2 * (work + own))
