"""Outcomes read from the conversation, where no adapter reports them; and what several sources tell, counted once."""

from __future__ import annotations

import doctest
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl_core.learning.outcomes
from agl_core.learning import build_episode
from agl_core.learning.outcomes import FROM_MESSAGES, message_status, told_once
from agl_core.types import Episode, Outcome, OutcomeStatus


def answer(tool_call_id: str, content: Any = "22 °C", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": tool_call_id, "content": content, **more}


def asking(make: Any, ids: list[str], *messages: dict[str, Any], reported: tuple[Outcome, ...] = ()) -> Episode:
    """A call that asks for tools, and the next one, whose request holds these messages."""
    calls = [
        make.call(0, make.choice(tool_calls=ids), agent="solver", parent_span="s"),
        make.call(1, request={"messages": [{"role": "user", "content": "hi"}, *messages]}),
    ]
    return build_episode(make.rollout(), make.attempt(), calls, reported)


def statuses(episode: Episode) -> list[str]:
    return [str(o.status) for o in episode.transitions[0].outcomes]


def test_docstring_examples_run() -> None:
    outcome = doctest.testmod(agl_core.learning.outcomes)
    assert outcome.attempted >= 3
    assert outcome.failed == 0


@pytest.mark.parametrize(
    ("content", "status"),
    [
        ("sunny", "ok"),
        ("0", "ok"),
        ("false", "ok"),
        ("Errors were rare in 2020.", "ok"),
        ("The error: none", "ok"),
        ("last_error: none", "ok"),
        ([{"type": "text", "text": "sunny"}], "ok"),
        ([{"type": "image_url", "image_url": {"url": "…"}}], "ok"),
        (None, "empty"),
        ("", "empty"),
        (" \n", "empty"),
        ([], "empty"),
        ("null", "empty"),
        ("None", "empty"),
        ("[]", "empty"),
        ("{}", "empty"),
        ([{"type": "text", "text": ""}], "empty"),
        ("Error: ValueError('bad')\n Please fix your mistakes.", "error"),
        ("Error: look_up is not a valid tool, try one of [look].", "error"),
        ("Error invoking tool 'look' with kwargs {} with error:\n x is missing", "error"),
        ("An error occurred while running the tool. Please try again. Error: boom", "error"),
        ("sqlite3.OperationalError: no such table: t", "error"),
        ("KeyError: 'x'", "error"),
        ("error: command failed", "error"),
        ("Traceback (most recent call last):\n  File …", "error"),
        ([{"type": "text", "text": "ValueError: bad"}], "error"),
        ("TimeoutError: 5 s", "timeout"),
        ("Error: the request timed out", "timeout"),
        ("httpx.ReadTimeoutError: ", "timeout"),
    ],
)
def test_what_a_message_says_became_of_the_tool(content: Any, status: str) -> None:
    assert str(message_status(content)) == status


def test_the_messages_own_status_is_believed() -> None:
    assert message_status("boom", "error") is OutcomeStatus.ERROR
    assert message_status("", "error") is OutcomeStatus.ERROR
    assert message_status("Error: quoted from a log", "success") is OutcomeStatus.OK
    assert message_status("", "success") is OutcomeStatus.EMPTY


@given(
    content=st.recursive(st.none() | st.booleans() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
def test_any_content_has_a_status(content: Any) -> None:
    assert message_status(content) in OutcomeStatus


def test_the_next_request_tells_what_the_tools_did(make: Any) -> None:
    episode = asking(make, ["a", "b", "c"], answer("b", "ValueError: no"), answer("a"), answer("c", ""))
    assert statuses(episode) == ["ok", "error", "empty"]
    first, second, _ = episode.transitions[0].outcomes
    assert first.id == f"{FROM_MESSAGES}r-c0:a"
    assert (first.tool, first.arguments, first.result, first.error, first.agent) == (
        "look",
        {},
        "22 °C",
        None,
        "solver",
    )
    assert (second.result, second.error) == (None, "ValueError: no")
    assert episode.transitions[1].outcomes == ()
    assert episode.unjoined == ()


def test_a_tool_call_that_is_never_answered_has_no_outcome(make: Any) -> None:
    assert statuses(asking(make, ["a", "b"], answer("a"))) == ["ok"]


def test_an_answer_is_counted_once_though_every_later_request_repeats_it(make: Any) -> None:
    later = {"messages": [answer("a"), answer("a", "Error: changed since")]}
    calls = [make.call(0, make.choice(tool_calls=["a"])), make.call(1, request=later), make.call(2, request=later)]
    assert statuses(build_episode(make.rollout(), make.attempt(), calls)) == ["ok"]


def test_messages_that_nobody_asked_for_are_none(make: Any) -> None:
    calls = [make.call(0, make.choice(tool_calls=["a"]), request={"messages": [answer("a"), answer("x")]})]
    episode = build_episode(make.rollout(), make.attempt(), calls)
    assert (statuses(episode), episode.unjoined) == ([], ())


def test_what_an_adapter_reported_wins(make: Any) -> None:
    reported = make.outcome("o", "a", status=OutcomeStatus.TIMEOUT)
    episode = asking(make, ["a", "b"], answer("a"), answer("b"), reported=(reported,))
    assert statuses(episode) == ["timeout", "ok"]
    assert episode.transitions[0].outcomes[0] is reported


def test_an_outcome_that_joins_by_span_speaks_for_the_whole_response(make: Any) -> None:
    reported = make.outcome("o", None, parent_span="s", status=OutcomeStatus.ERROR)
    episode = asking(make, ["a", "b"], answer("a"), answer("b"), reported=(reported,))
    assert statuses(episode) == ["error"]


@pytest.mark.parametrize(
    "messages", [None, "text", [None, 3], [{"role": "tool"}], [{"role": "tool", "tool_call_id": []}]]
)
def test_a_request_that_is_no_conversation_tells_nothing(make: Any, messages: Any) -> None:
    calls = [make.call(0, make.choice(tool_calls=["a"])), make.call(1, request={"messages": messages})]
    assert statuses(build_episode(make.rollout(), make.attempt(), calls)) == []


def joined(make: Any, ids: list[str], *told: Outcome) -> list[str]:
    """The ids of what is joined with a call that asked for these tools."""
    return [outcome.id for outcome in asking(make, ids, reported=told).transitions[0].outcomes]


def test_an_adapter_goes_before_spans_and_these_before_messages(make: Any) -> None:
    span, adapter = make.outcome("otel:1:2", "t1", started=1.0), make.outcome("langchain:1", "t1", started=2.0)
    assert joined(make, ["t1"], span, adapter) == joined(make, ["t1"], adapter, span) == ["langchain:1"]
    assert joined(make, ["t1"], span) == ["otel:1:2"]
    episode = asking(make, ["t1", "t2"], answer("t1"), answer("t2"), reported=(span,))
    assert [o.id.partition(":")[0] for o in episode.transitions[0].outcomes] == ["otel", "messages"]


def test_of_two_adapters_the_one_that_ran_the_other_counts(make: Any) -> None:
    outer, inner = make.outcome("autogen:1", "t1", started=1.0), make.outcome("aaa:1", "t1", started=1.5)
    assert joined(make, ["t1"], outer, inner) == joined(make, ["t1"], inner, outer) == ["autogen:1"]
    untimed = make.outcome("aaa:1", "t1")
    assert joined(make, ["t1"], outer, untimed) == joined(make, ["t1"], untimed, outer) == ["autogen:1"]


def test_a_tool_that_ran_twice_is_told_twice_by_its_source(make: Any) -> None:
    runs = [make.outcome(f"langchain:{n}", "t1", started=float(n)) for n in (1, 2)]
    assert joined(make, ["t1"], *runs, make.outcome("otel:1:2", "t1", started=0.0)) == ["langchain:1", "langchain:2"]
    assert joined(make, ["t1"], make.outcome("1", "t1"), make.outcome("2", "t1")) == ["1", "2"]


def test_what_nobody_asked_for_is_told_once_too(make: Any) -> None:
    told = (make.outcome("langchain:1", "gone"), make.outcome("otel:1:2", "gone"), make.outcome("otel:1:3"))
    assert [o.id for o in asking(make, ["t1"], reported=told).unjoined] == ["langchain:1", "otel:1:3"]


SOURCES = ("langchain", "autogen", "tool", "otel", "messages", "")


@st.composite
def reports(draw: st.DrawFn) -> list[tuple[str, int, str | None, float | None]]:
    """(source, number, tool call id, start) each, as several adapters, spans and messages may tell."""
    one = st.tuples(
        st.sampled_from(SOURCES),
        st.integers(0, 3),
        st.sampled_from(["t1", "t2", "t3", None]),
        st.none() | st.floats(0, 10),
    )
    return draw(st.lists(one, max_size=12, unique_by=lambda each: each[:2]))


@given(told=reports(), order=st.randoms(use_true_random=False))
def test_each_tool_call_has_one_source_whatever_came_first(make: Any, told: Any, order: Any) -> None:
    given_ = [make.outcome(f"{s}:{n}" if s else f"{n}", id, started=at) for s, n, id, at in told]
    shuffled = [*given_, *(replace(each) for each in given_)]
    order.shuffle(shuffled)
    kept = told_once(shuffled)

    assert {o.id for o in kept} == {o.id for o in told_once(given_)}
    assert len({o.id for o in kept}) == len(kept)
    assert told_once(kept) == kept
    # Nothing without an id is lost; of each id, all that one of its sources told is kept, and nothing else.
    assert [o.id for o in kept if o.tool_call_id is None] == [
        id for id in dict.fromkeys(o.id for o in shuffled) if id in {o.id for o in given_ if o.tool_call_id is None}
    ]
    for id in {o.tool_call_id for o in given_} - {None}:
        candidates = [o for o in given_ if o.tool_call_id == id]
        (source,) = {source_of(o) for o in kept if o.tool_call_id == id}
        assert {o.id for o in kept if o.tool_call_id == id} == {o.id for o in candidates if source_of(o) == source}
        if {source_of(o) for o in candidates} - {"otel", "messages"}:
            assert source not in ("otel", "messages")
        elif source == "messages":
            assert {source_of(o) for o in candidates} == {"messages"}


def source_of(outcome: Outcome) -> str:
    return outcome.id.split(":")[0] if ":" in outcome.id else ""
