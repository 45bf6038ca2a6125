"""Calls become episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.learning.transitions import build_episode, grammar_of
from agl_core.testing import episodes as make
from agl_core.types import Ending, Episode


def shape(episode: Episode) -> list[tuple[Any, ...]]:
    """The parts that must not depend on the order in which records are read."""
    return [
        (t.key, t.agent, t.turn, t.agent_turn, tuple(o.id for o in t.tool_results), t.policy, t.version)
        for t in episode.transitions
    ] + [tuple(sorted(o.id for o in episode.unjoined))]


def test_two_agents_interleaved_keep_order_and_count_their_own_turns() -> None:
    names = ["writer", "critic", "writer", "writer", "critic"]
    calls = [make.call(i, agent=name) for i, name in enumerate(names)]
    calls[2] = make.call(2, make.choice(0), make.choice(1), agent="writer")
    episode = build_episode(make.rollout(), make.attempt(), calls)
    assert [(t.agent, t.turn, t.agent_turn, t.key.choice) for t in episode.transitions] == [
        ("writer", 0, 0, 0),
        ("critic", 1, 0, 0),
        ("writer", 2, 1, 0),
        ("writer", 2, 1, 1),
        ("writer", 3, 2, 0),
        ("critic", 4, 1, 0),
    ]


def test_only_what_counts_is_in_the_episode_and_each_once() -> None:
    first = make.call(0)
    twins = [make.call(2), make.call(3)]  # equal, but no retries
    others = [make.call(4, late=True), make.call(5, attempt=1), make.call(6, undelivered=True)]
    calls = [*others, first, *twins, first]
    episode = build_episode(make.rollout(), make.attempt(ending=Ending.TIMED_OUT), calls)
    assert [(t.key.call, t.turn) for t in episode.transitions] == [("r-c0", 0), ("r-c2", 1), ("r-c3", 2)]
    assert [(t.key.call, t.turn) for t in episode.undelivered] == [("r-c6", 3)]
    assert episode.ending is Ending.TIMED_OUT


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"b": 1, "a": 2}}}


@pytest.mark.parametrize(
    ("request_", "form"),
    [
        ({"response_format": {"type": "text"}, "guided_regex": ""}, None),
        ({"response_format": JSON_SCHEMA}, '{"json": {"b": 1, "a": 2}}'),
        ({"response_format": {"type": "json_schema"}, "tool_choice": "auto"}, '{"json_object": true}'),
        ({"structured_outputs": {"choice": ["é"]}, "tools": [], "tool_choice": "none"}, '{"choice": ["é"]}'),
        ({"guided_json": "{}", "tools": [{}]}, '{"json": "{}", "or_call": true}'),
        ({"response_format": {"type": "json_object"}, "tools": [{}], "tool_choice": "required"}, None),
        ({"response_format": "json", "structured_outputs": 3}, None),
    ],
)  # fmt: skip
def test_the_form_that_a_reply_must_have_is_the_transitions(request_: dict[str, Any], form: str | None) -> None:
    assert grammar_of(request_) == form
    (transition,) = build_episode(make.rollout(), make.attempt(), [make.call(0, request=request_)]).transitions
    assert transition.grammar == form


def test_what_a_call_says_of_its_sampling_is_kept() -> None:
    call = make.call(0, make.choice(response_ids=None, logprobs=None), prompt_ids=None)
    calls = [call] + [
        replace(make.call(n), effective=replace(call.effective, temperature=temperature))
        for n, temperature in enumerate((0.0, 0.7, None), start=1)
    ]
    transitions = build_episode(make.rollout(), make.attempt(), calls).transitions
    assert [t.has_ids for t in transitions] == [False, True, True, True]
    assert [t.temperature for t in transitions][1:] == [0.0, 0.7, 1.0]


@given(data=st.data())
def test_the_order_of_records_does_not_matter(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    names = data.draw(st.lists(st.sampled_from(["a", "b", None]), min_size=count, max_size=count))
    tools = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    calls = [
        make.call(i, make.choice(tool_calls=[f"{i}.{k}" for k in range(tools[i])]), agent=names[i])
        for i in range(count)
    ]
    tool_results = [make.tool_result(f"o{i}.{k}", f"{i}.{k}") for i in range(count) for k in range(tools[i])]
    expected = build_episode(make.rollout(), make.attempt(), calls, tool_results)
    repeated = [*calls, *data.draw(st.lists(st.sampled_from(calls), max_size=3))]
    shuffled = build_episode(
        make.rollout(),
        make.attempt(),
        data.draw(st.permutations(repeated)),
        data.draw(st.permutations([*tool_results, *tool_results[:1]])),
    )
    assert shape(shuffled) == shape(expected)
    assert sum(len(t.tool_results) for t in expected.transitions) + len(expected.unjoined) == len(tool_results)
    assert [t.key.call for t in expected.transitions] == [c.id for c in calls]
    for name in {*names}:
        turns = [t.agent_turn for t in expected.transitions if t.agent == name]
        assert turns == list(range(len(turns)))
