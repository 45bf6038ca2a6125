"""Endpoints that count tool calls anew for each reply or conversation: `call_0` again and again in one attempt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.learning.transitions import build_episode
from agl_core.testing import episodes as make
from agl_core.types import Call, Episode, ToolResult

ID = "call_0"


def asks(arguments: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": ID, "type": "function", "function": function}]}


def answer(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": ID, "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def episode(calls: list[Call], *reports: ToolResult) -> Episode:
    return build_episode(make.rollout(), make.attempt(), calls, reports)


def results(episode: Episode) -> list[list[Any]]:
    return [[tool_result.result for tool_result in transition.tool_results] for transition in episode.transitions]


class Conversation:
    """An agent's messages; each call repeats all that came before it."""

    def __init__(self, name: str, **call: Any) -> None:
        self._name, self._call = name, call
        self.messages = [user(f"I am {name}.")]
        self._turns = 0

    def ask(self, sequence: int) -> tuple[Call, str]:
        """A call that asks for a tool, and what that gives."""
        message = asks(f'{{"of": "{self._name}", "turn": {self._turns}}}')
        result = f"{self._name} {self._turns}"
        choice = make.choice(tool_calls=[ID])
        choice.message["tool_calls"] = message["tool_calls"]
        call = make.call(sequence, choice, request={"messages": list(self.messages)}, **self._call)
        self.messages += [message, answer(result)]
        self._turns += 1
        return call, result

    def end(self, sequence: int) -> Call:
        call: Call = make.call(sequence, request={"messages": list(self.messages)}, **self._call)
        return call


@given(speakers=st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
def test_the_conversation_shows_which_call_an_answer_is_of(speakers: list[str]) -> None:
    conversations = {name: Conversation(name) for name in speakers}
    turns = [conversations[name].ask(number) for number, name in enumerate(speakers)]
    last = [conversation.end(len(speakers) + number) for number, conversation in enumerate(conversations.values())]
    joined = results(episode([*(call for call, _ in turns), *last]))
    assert joined == [[result] for _, result in turns] + [[]] * len(last)


def test_an_answer_to_one_conversation_is_none_to_another_that_waits() -> None:
    a, b = Conversation("a"), Conversation("b")
    calls = [a.ask(0)[0], b.ask(1)[0], b.ask(2)[0], b.end(3)]
    assert results(episode(calls)) == [[], ["b 0"], ["b 1"], []]


def test_where_a_request_does_not_show_what_asked_the_latest_call_is_answered() -> None:
    one, two = (make.call(n, make.choice(tool_calls=[ID])) for n in (0, 1))
    later = [make.call(n, request={"messages": [user("?"), answer("found")]}) for n in (2, 3)]
    assert results(episode([one, two, *later])) == [[], ["found"], [], []]


def test_what_is_reported_of_one_call_leaves_the_other_to_the_conversation() -> None:
    a = Conversation("a", parent_span="first"), Conversation("b", parent_span="second")
    calls = [a[0].ask(0)[0], a[1].ask(1)[0], a[0].end(2), a[1].end(3)]
    report = make.tool_result("o", ID, result="seen", parent_span="first", adapter="langchain")
    assert results(episode(calls, report))[:2] == [["seen"], ["b 0"]]


@pytest.mark.parametrize("by", ["parent_span", "agent"])
def test_a_report_belongs_to_the_call_of_its_span_else_of_its_agent(by: str) -> None:
    calls = [make.call(n, make.choice(tool_calls=[ID]), **{by: name}) for n, name in enumerate("ab")]
    reports = [make.tool_result(name, ID, result=name, **{by: name}) for name in "ba"]
    assert results(episode(calls, *reports)) == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (["0", "1", "2"], [["0"], ["1"], ["2"]]),
        (["2"], [[], [], ["2"]]),
        (["0", "1", "2", "2 again"], [["0"], ["1"], ["2", "2 again"]]),
    ],
)
def test_reports_that_say_no_more_are_of_the_latest_calls_in_their_order(
    reported: list[str], expected: list[list[str]]
) -> None:
    calls = [make.call(n, make.choice(tool_calls=[ID])) for n in range(3)]
    reports = [make.tool_result(result, ID, result=result) for result in reported]
    assert results(episode(calls, *reports)) == expected


def test_a_report_is_of_the_call_that_the_conversation_shows_to_be_answered() -> None:
    a = Conversation("a")
    calls = [a.ask(0)[0], a.ask(1)[0]]  # the agent was stopped before it ran the second tool
    assert results(episode(calls, make.tool_result("o", ID, result="seen"))) == [["seen"], []]
