"""Tool results from the conversation where no adapter reports them; what several sources report counts once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.learning.tool_results import function_of
from agl_core.learning.transitions import build_episode
from agl_core.testing import episodes as make
from agl_core.types import AlarmName, Call, Episode, Json, Source, ToolResult, ToolStatus
from agl_server.health.alarms import alarms_on


def answer(tool_call_id: str, content: Any = "22 °C") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": tool_call_id, "content": content}


def episode_asking(ids: list[str], *messages: dict[str, Any], reported: tuple[ToolResult, ...] = ()) -> Episode:
    """A call that asks for tools, and the next one, whose request holds these messages."""
    calls = [
        make.call(0, make.choice(tool_calls=ids), agent="solver", parent_span="s"),
        make.call(1, request={"messages": [{"role": "user", "content": "hi"}, *messages]}),
    ]
    return build_episode(make.rollout(), make.attempt(), calls, reported)


def result_of(content: str | None, reported: ToolResult) -> ToolResult:
    """The result of a call's one tool, which has this report and, unless it is None, this answer."""
    answers = [] if content is None else [answer("a", content)]
    (result,) = episode_asking(["a"], *answers, reported=(reported,)).transitions[0].tool_results
    return result


def statuses(episode: Episode) -> list[str]:
    return [str(o.status) for o in episode.transitions[0].tool_results]


def test_the_next_request_tells_what_the_tools_did() -> None:
    episode = episode_asking(["a", "b", "c", "unanswered"], answer("b", "ValueError: no"), answer("a"), answer("c", ""))
    assert statuses(episode) == ["ok", "error", "empty"]
    first, second, _ = episode.transitions[0].tool_results
    assert (first.source, first.adapter) == (Source.CONVERSATION, None)
    called = (first.tool, first.arguments, first.result, first.error, first.agent)
    assert called == ("look", {}, "22 °C", None, "solver")
    assert (second.result, second.error) == (None, "ValueError: no")
    assert episode.transitions[1].tool_results == ()
    assert episode.unjoined == ()


def test_an_answer_is_counted_once_though_every_later_request_repeats_it() -> None:
    later = {"messages": [answer("a"), answer("a", "Error: changed since")]}
    earlier = {"messages": [answer("a", "Error: nobody asked for it"), answer("x")]}
    first = make.call(0, make.choice(tool_calls=["a"]), request=earlier)
    calls = [first, make.call(1, request=later), make.call(2, request=later)]
    episode = build_episode(make.rollout(), make.attempt(), calls)
    assert (statuses(episode), episode.unjoined) == (["ok"], ())


def test_an_tool_result_that_joins_by_span_speaks_for_the_whole_response() -> None:
    reported = make.tool_result("o", None, parent_span="s", status=ToolStatus.ERROR)
    episode = episode_asking(["a", "b"], answer("a"), answer("b"), reported=(reported,))
    assert statuses(episode) == ["error"]
    # But it denies no failure that the model was shown.
    reported = replace(reported, status=ToolStatus.OK)
    episode = episode_asking(["a", "b"], answer("a"), answer("b", "Error: no city"), reported=(reported,))
    assert sorted(statuses(episode)) == ["error", "ok"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("22 °C", ("ok", "22 °C", None, "ok")),
        ("", ("empty", "", None, "empty")),
        ("ValueError: no city", ("error", None, "ValueError: no city", "exception")),
        (None, ("ok", None, None, "unknown")),
    ],
)
def test_a_span_without_a_result_leaves_it_to_the_conversation(content: str | None, expected: tuple[Any, ...]) -> None:
    span = report("1:2", "a", "otel", source=Source.SPAN, status_rule="unknown", started=3.0)
    result = result_of(content, span)
    assert (str(result.status), result.result, result.error, result.status_rule) == expected
    own = (result.id, result.adapter, result.source, result.started, result.arguments)
    assert own == ("1:2", "otel", Source.SPAN, 3.0, {})


@pytest.mark.parametrize("rule", ["raised", "reported-error", "empty", "reported-success", None])
def test_what_a_report_found_is_not_taken_back_by_the_conversation(rule: str | None) -> None:
    reported = report("1:2", "a", "otel", status=ToolStatus.EMPTY, status_rule=rule, result="")
    result = result_of("Error: quoted", reported)
    assert (result.status, result.status_rule) == (ToolStatus.EMPTY, rule)


@pytest.mark.parametrize("source", [Source.COMMAND, Source.SPAN])
@pytest.mark.parametrize("named", ["a", None])
@pytest.mark.parametrize("rule", ["reported-success", "ok", "empty", None])
def test_no_report_denies_a_failure_that_the_model_was_shown(
    source: Source, named: str | None, rule: str | None
) -> None:
    """The report may name the tool call or only fit it; the contradiction is marked, counted and cautioned about."""
    (tool_call,) = make.choice(tool_calls=["a"]).message["tool_calls"]
    fields = {"id": "o", "tool": tool_call["function"]["name"], "status": ToolStatus.OK, "tool_call_id": named}
    reported = ToolResult(
        **fields, rollout="r", attempt=0, arguments={}, result="42", source=source, adapter="mine", status_rule=rule
    )
    episode = episode_asking(["a"], answer("a", "Error: no city"), reported=(reported,))
    (result,) = episode.transitions[0].tool_results
    assert (result.status, result.status_rule) == (ToolStatus.ERROR, "contradicted")
    assert (result.source, result.result, result.error) == (Source.CONVERSATION, None, "Error: no city")
    [alarm] = alarms_on([episode, episode], [AlarmName.CONTRADICTED_TOOL_RESULTS])
    assert alarm.seen.startswith("2 of 2 tool results")


@pytest.mark.parametrize(
    ("reported", "ids"),
    [
        ("ok", ["o0", "r-c0:0:0"]),  # It may be of the tool call that worked.
        ("ok ok", ["o1", "r-c0:0:0 contradicted"]),
        ("ok ok ok error", ["o3", "r-c0:0:1 contradicted"]),
    ],
)
def test_no_reports_of_a_whole_response_deny_a_failure_that_the_model_was_shown(reported: str, ids: list[str]) -> None:
    """The number of reports that say otherwise does not matter, nor that one tells another failure."""
    statuses = [ToolStatus(status) for status in reported.split()]
    contents = ["Error: no city", "Error: no date" if ToolStatus.ERROR in statuses else "22"]
    calls = [
        make.call(0, make.choice(tool_calls=["a", "b"]), parent_span="step-0"),
        make.call(1, request={"messages": [answer(id, text) for id, text in zip("ab", contents, strict=True)]}),
    ]
    reports = [
        report(f"o{number}", None, "mine", status=status, parent_span="step-0", tool="x", source=Source.COMMAND)
        for number, status in enumerate(statuses)
    ]
    episode = build_episode(make.rollout(), make.attempt(), calls, reports)
    results = episode.transitions[0].tool_results
    marked = [f"{result.id} contradicted" if result.status_rule == "contradicted" else result.id for result in results]
    assert sorted(marked) == ids


def test_a_report_that_found_nothing_keeps_its_result() -> None:
    """A span has the structured result, and the message that it was empty."""
    span = report("1:2", "a", "otel", status_rule="ok", result={"blocks": []})
    for content, expected in (("", (ToolStatus.EMPTY, "empty")), ("no city", (ToolStatus.OK, "ok"))):
        result = result_of(content, span)
        assert (result.status, result.status_rule, result.result) == (*expected, {"blocks": []})


def calls_to_look(*directions: str | None) -> list[Any]:
    """A call for each direction that asks to look there (None: for nothing), in steps of one agent."""
    calls = []
    for number, direction in enumerate(directions):
        choice = make.choice(tool_calls=[] if direction is None else [f"c{number}"])
        for tool_call in choice.message.get("tool_calls") or ():
            tool_call["function"]["arguments"] = f'{{"direction": "{direction}"}}'
        calls.append(make.call(number, choice, agent="solver", parent_span=f"step-{number}"))
    return calls


def look_result(name: str, direction: str | None, **more: Any) -> ToolResult:
    arguments = None if direction is None else {"direction": direction}
    return report(name, None, "otel", **{"arguments": arguments, "parent_span": "a tool's own", **more})


def join(calls: list[Any], *reported: ToolResult) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Join; the joined reports as (turn of the call, report, tool call id), and the ids of the others."""
    episode = build_episode(make.rollout(), make.attempt(), calls, reported)
    joined = [(t.turn, o.id, o.tool_call_id) for t in episode.transitions for o in t.tool_results]
    return joined, [o.id for o in episode.unjoined]


def test_a_tool_result_without_an_id_answers_the_one_tool_call_that_it_fits() -> None:
    calls = calls_to_look("north", "south", "north")
    assert join(calls, look_result("1", "south", agent="solver")) == ([(1, "1", "c1")], [])
    # Two tool calls that it fits, two that fit one tool call, another tool, other arguments, another agent: none.
    assert join(calls, look_result("1", "north")) == ([], ["1"])
    assert join(calls, look_result("1", "south"), look_result("2", "south")) == ([], ["1", "2"])
    assert join(calls, look_result("1", "south", tool="dig")) == ([], ["1"])
    assert join(calls, look_result("1", "west")) == ([], ["1"])
    assert join(calls, look_result("1", None)) == ([], ["1"])
    assert join(calls, look_result("1", "south", agent="critic")) == ([], ["1"])


def test_the_enclosing_span_decides_which_of_equal_tool_calls() -> None:
    calls = calls_to_look("north", "south", "north")
    both = [look_result("1", "north", parent_span="step-2"), look_result("2", "north", parent_span="step-0")]
    assert join(calls, *both) == ([(0, "2", "c0"), (2, "1", "c2")], [])
    assert join(calls, look_result("1", None, parent_span="step-1")) == ([(1, "1", "c1")], [])


def test_after_a_call_of_an_unknown_agent_only_tool_and_arguments_decide() -> None:
    calls = [*calls_to_look("north", "south"), make.call(2, agent=None, parent_span=None, stamped=False)]
    assert join(calls, look_result("1", "north", parent_span="step-0")) == ([(0, "1", "c0")], [])
    assert join(calls, look_result("1", None, parent_span="step-0")) == ([(0, "1", "c0")], [])
    assert join(calls, look_result("1", None, parent_span="step-1")) == ([], ["1"])
    assert join(calls, look_result("1", "south", parent_span="step-1")) == ([(1, "1", "c1")], [])
    assert join(calls, look_result("1", "west", parent_span="step-1")) == ([], ["1"])


@pytest.mark.parametrize("uncounted", ["late", "undelivered"])
def test_a_report_under_a_call_that_does_not_count_joins_nothing(uncounted: str) -> None:
    calls = [*calls_to_look("north"), make.call(1, parent_span="step-1", **{uncounted: True})]
    assert join(calls, look_result("1", "north", parent_span="step-1")) == ([], ["1"])
    assert join(calls, replace(look_result("1", "north"), tool_call_id="of no call")) == ([], ["1"])


def test_a_tool_call_that_a_report_answers_by_its_id_is_not_open() -> None:
    calls = calls_to_look("north", "north")
    by_id = report("9", "c0", "langchain")
    assert join(calls, by_id, look_result("1", "north")) == ([(0, "9", "c0"), (1, "1", "c1")], [])


def test_a_failing_span_that_joins_nothing_marks_what_it_may_contradict() -> None:
    def rules(*spans: ToolResult, contents: tuple[str, str] = ("no city", "22")) -> list[str | None]:
        messages = [answer(f"c{number}", content) for number, content in enumerate(contents)]
        calls = [*calls_to_look("north", "north"), make.call(2, request={"messages": messages})]
        episode = build_episode(make.rollout(), make.attempt(), calls, spans)
        assert [o.id for o in episode.unjoined] == [span.id for span in spans]
        return [o.status_rule for transition in episode.transitions for o in transition.tool_results]

    failed = look_result("1", "north", status=ToolStatus.ERROR)
    assert rules() == rules(look_result("1", "north")) == ["ok", "ok"]
    assert rules(failed) == ["contradicted", "contradicted"]
    assert rules(failed, contents=("Error: no city", "22")) == ["error", "ok"]
    assert rules(failed, replace(failed, id="2"), contents=("Error: no city", "22")) == ["error", "contradicted"]
    assert rules(replace(failed, tool="dig")) == ["ok", "ok"]


@pytest.mark.parametrize(
    "messages", [None, "text", [None, 3], [{"role": "tool"}], [{"role": "tool", "tool_call_id": []}]]
)
def test_a_request_that_is_no_conversation_tells_nothing(messages: Any) -> None:
    calls = [make.call(0, make.choice(tool_calls=["a"])), make.call(1, request={"messages": messages})]
    assert statuses(build_episode(make.rollout(), make.attempt(), calls)) == []


def joined(ids: list[str], *reports: ToolResult) -> list[str]:
    """The ids of what is joined with a call that asked for these tools."""
    return [tool_result.id for tool_result in episode_asking(ids, reported=reports).transitions[0].tool_results]


def report(name: str, tool_call_id: str | None, adapter: str | None, **more: Any) -> ToolResult:
    return make.tool_result(name, tool_call_id, adapter=adapter, **more)


def test_an_adapter_goes_before_spans_and_these_before_messages() -> None:
    span = report("1:2", "t1", "otel", started=1.0, source=Source.SPAN)
    adapter = report("1", "t1", "langchain", started=2.0)
    assert joined(["t1"], span, adapter) == joined(["t1"], adapter, span) == ["1"]
    assert joined(["t1"], span) == ["1:2"]
    episode = episode_asking(["t1", "t2"], answer("t1"), answer("t2"), reported=(span,))
    assert [o.source for o in episode.transitions[0].tool_results] == [Source.SPAN, Source.CONVERSATION]


def test_of_two_adapters_the_one_that_ran_the_other_counts() -> None:
    outer, inner = report("1", "t1", "autogen", started=1.0), report("2", "t1", "aaa", started=1.5)
    assert joined(["t1"], outer, inner) == joined(["t1"], inner, outer) == ["1"]
    untimed = report("2", "t1", "aaa")
    assert joined(["t1"], outer, untimed) == joined(["t1"], untimed, outer) == ["1"]


def test_reports_are_in_the_order_of_the_tool_calls_and_of_no_call_that_did_not_ask() -> None:
    reports = [report(id, tool_call_id, None) for id, tool_call_id in (("3", "c"), ("1", "a"), ("2", "b"), ("4", "x"))]
    assert joined(["a", "b", "c"], *reports) == ["1", "2", "3"]
    assert [o.id for o in episode_asking(["a", "b", "c"], reported=tuple(reports)).unjoined] == ["4"]
    calls = [make.call(0, parent_span="s1"), make.call(1, parent_span="s2"), make.call(2, parent_span="s2")]
    under = [make.tool_result("sure", parent_span="s1"), make.tool_result("ambiguous", parent_span="s2")]
    assert join(calls, *under) == ([(0, "sure", None)], ["ambiguous"])


def test_a_tool_that_ran_twice_is_told_twice_by_its_adapter() -> None:
    runs = [report(f"{n}", "t1", "langchain", started=float(n)) for n in (1, 2)]
    assert joined(["t1"], *runs, report("1:2", "t1", "otel", started=0.0)) == ["1", "2"]
    assert joined(["t1"], make.tool_result("1", "t1"), make.tool_result("2", "t1")) == ["1", "2"]


def test_what_nobody_asked_for_is_told_once_too() -> None:
    reports = report("1", "gone", "langchain"), report("1:2", "gone", "otel"), report("1:3", None, "otel")
    assert [o.id for o in episode_asking(["t1"], reported=reports).unjoined] == ["1", "1:3"]


@pytest.mark.parametrize("order", [1, -1])
def test_a_span_over_the_network_does_not_speak_for_one_of_the_agents_own_process(order: int) -> None:
    own = report("1:2", "t1", "otel", status=ToolStatus.ERROR)
    over_otlp = replace(own, source=Source.SPAN, status=ToolStatus.OK)
    episode = episode_asking(["t1"], reported=(own, over_otlp)[::order])
    assert episode.transitions[0].tool_results == (replace(own, arguments={}, agent="solver"),)


DEEP = "[" * 999 + "]" * 999


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (r'{"a": "\ud83c"}', {"a": "\ufffd"}),
        (f'{{"a": {2**70}}}', {"a": 2.0**70}),
        *((text, text) for text in ("[NaN]", "[-Infinity]", "1" * 5000, "[" * 9999, DEEP, '"\ud83c"', "{")),
    ],
)
def test_arguments_that_are_no_json_which_can_be_written_stay_text(written: str, arguments: Json) -> None:
    assert function_of({"function": {"name": "f", "arguments": written}}) == ("f", arguments)


# Endpoints that count tool calls anew for each reply or conversation: `call_0` again and again in one attempt.


ID = "call_0"


def asks(arguments: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": ID, "type": "function", "function": function}]}


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
        self.messages += [message, answer(ID, result)]
        self._turns += 1
        return call, result

    def end(self, sequence: int) -> Call:
        return make.call(sequence, request={"messages": list(self.messages)}, **self._call)


@given(speakers=st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
def test_the_conversation_shows_which_call_an_answer_is_of(speakers: list[str]) -> None:
    conversations = {name: Conversation(name) for name in speakers}
    turns = [conversations[name].ask(number) for number, name in enumerate(speakers)]
    last = [conversation.end(len(speakers) + number) for number, conversation in enumerate(conversations.values())]
    joined = results(episode([*(call for call, _ in turns), *last]))
    assert joined == [[result] for _, result in turns] + [[]] * len(last)


def test_where_a_request_does_not_show_what_asked_the_latest_call_is_answered() -> None:
    one, two = (make.call(n, make.choice(tool_calls=[ID])) for n in (0, 1))
    later = [make.call(n, request={"messages": [user("?"), answer(ID, "found")]}) for n in (2, 3)]
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
