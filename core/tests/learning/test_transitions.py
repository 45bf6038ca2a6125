"""Calls and tool results become episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.learning import build_episode
from agl_core.types import Episode, ToolStatus


def shape(episode: Episode) -> list[tuple[Any, ...]]:
    """What must not depend on the order in which records are read."""
    return [
        (t.key, t.agent, t.turn, t.agent_turn, tuple(o.id for o in t.tool_results), t.policy, t.version)
        for t in episode.transitions
    ] + [tuple(sorted(o.id for o in episode.unjoined))]


def test_two_agents_interleaved_keep_order_and_count_their_own_turns(make: Any) -> None:
    names = ["writer", "critic", "writer", "writer", "critic"]
    calls = [make.call(i, agent=name) for i, name in enumerate(names)]
    episode = build_episode(make.rollout(), make.attempt(), calls)
    assert [(t.agent, t.turn, t.agent_turn) for t in episode.transitions] == [
        ("writer", 0, 0),
        ("critic", 1, 0),
        ("writer", 2, 1),
        ("writer", 3, 2),
        ("critic", 4, 1),
    ]


def test_parallel_tool_calls_are_joined_by_id_in_the_order_they_were_asked_for(make: Any) -> None:
    calls = [make.call(0, make.choice(tool_calls=["a", "b", "c"])), make.call(1)]
    tool_results = [
        make.tool_result("late", "c", status=ToolStatus.TIMEOUT),
        make.tool_result("first", "a"),
        make.tool_result("second", "b", status=ToolStatus.ERROR),
        make.tool_result("stray", "of-nobody"),
    ]
    episode = build_episode(make.rollout(), make.attempt(), calls, tool_results)
    assert [o.id for o in episode.transitions[0].tool_results] == ["first", "second", "late"]
    assert episode.transitions[1].tool_results == ()
    assert [o.id for o in episode.unjoined] == ["stray"]


def test_an_tool_result_without_id_joins_by_the_only_call_of_its_span(make: Any) -> None:
    calls = [make.call(0, parent_span="s1"), make.call(1, parent_span="s2"), make.call(2, parent_span="s2")]
    tool_results = [make.tool_result("sure", parent_span="s1"), make.tool_result("ambiguous", parent_span="s2")]
    episode = build_episode(make.rollout(), make.attempt(), calls, tool_results)
    assert [[o.id for o in t.tool_results] for t in episode.transitions] == [["sure"], [], []]
    assert [o.id for o in episode.unjoined] == ["ambiguous"]


def test_retries_count_once_and_equal_prompts_without_marker_count_each(make: Any) -> None:
    first = make.call(0, retry_of="m1")
    retried = make.call(1, retry_of="m1")
    twins = [make.call(2), make.call(3)]
    episode = build_episode(make.rollout(), make.attempt(), [retried, first, *twins, first])
    assert [t.key.call for t in episode.transitions] == ["r-c0", "r-c2", "r-c3"]
    assert [t.turn for t in episode.transitions] == [0, 1, 2]


def test_late_calls_and_those_of_other_attempts_do_not_count(make: Any) -> None:
    calls = [make.call(0, late=True), make.call(1), make.call(2, attempt=1)]
    assert [t.key.call for t in build_episode(make.rollout(), make.attempt(), calls).transitions] == ["r-c1"]


def test_calls_without_ids_are_flagged(make: Any) -> None:
    calls = [make.call(0, make.choice(response_ids=None, logprobs=None), prompt_ids=None), make.call(1)]
    assert [t.has_ids for t in build_episode(make.rollout(), make.attempt(), calls).transitions] == [False, True]


def test_each_choice_is_a_transition_of_the_same_turn(make: Any) -> None:
    calls = [make.call(0, make.choice(0), make.choice(1)), make.call(1)]
    episode = build_episode(make.rollout(), make.attempt(), calls)
    assert [(t.turn, t.key.choice) for t in episode.transitions] == [(0, 0), (0, 1), (1, 0)]


@given(data=st.data())
def test_the_order_of_records_does_not_matter(make: Any, data: st.DataObject) -> None:
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
        mine = [t.agent_turn for t in expected.transitions if t.agent == name]
        assert mine == list(range(len(mine)))


@pytest.mark.parametrize("temperature", [0.0, 0.7, None])
def test_the_effective_temperature_is_kept(make: Any, temperature: float | None) -> None:
    call = make.call(0)
    call = replace(call, effective=replace(call.effective, temperature=temperature))
    episode = build_episode(make.rollout(), make.attempt(), [call])
    assert episode.transitions[0].temperature == (1.0 if temperature is None else temperature)
