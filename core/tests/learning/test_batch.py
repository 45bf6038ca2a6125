"""Calls become episodes, credited episodes become ragged batches, and nothing disappears without a reason."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.builtin import identical
from agl_core.errors import PluginError
from agl_core.learning.batch import BatchPlan, PolicyCredit, filter_trainable, make_batches, subset
from agl_core.learning.transitions import build_episode, grammar_of
from agl_core.testing import engines
from agl_core.testing import episodes as make
from agl_core.testing.engines import Row
from agl_core.types import Batch, Call, CreditKind, DropReason, Ending, Episode, FinishReason, TransitionKey
from agl_core.types.episodes import Moment


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
        ({"guided_json": "{}", "tools": [{"function": {"name": "f"}}]}, '{"json": "{}", "or_call": {"f": {}}}'),
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


# Batches, and what of them can be trained on.


IDENTICAL = {"default": PolicyCredit("identical", identical, CreditKind.RETURN)}


def built(name: str, calls: list[Call], terminal: float = 1.0, **changes: Any) -> Episode:
    return replace(build_episode(make.rollout(name), make.attempt(name), calls), terminal=terminal, **changes)


def episode(name: str, lengths: list[int], terminal: float, **changes: Any) -> Episode:
    agents = itertools.cycle(["solver", "critic"])
    calls = [make.call(i, make.choice(tokens=n), rollout=name, agent=next(agents)) for i, n in enumerate(lengths)]
    return built(name, calls, terminal, **changes)


@given(data=st.data())
def test_every_transition_is_in_the_batch_or_dropped_with_a_reason(data: st.DataObject) -> None:
    sizes = st.lists(st.integers(0, 5), min_size=0, max_size=4)
    groups = [
        [
            episode(f"g{g}m{m}", lengths, float(g - m), dropped=data.draw(st.sampled_from([None, DropReason.ENDING])))
            for m, lengths in enumerate(members)
        ]
        for g, members in enumerate(
            data.draw(st.lists(st.lists(sizes, min_size=1, max_size=3), min_size=1, max_size=3))
        )
    ]
    prepared = make_batches(groups, BatchPlan(IDENTICAL, ["solver"], min_group_size=2))
    kept = [key for batch in prepared.batches.values() for key in batch.keys]
    left_out = [record.key for record in prepared.dropped]
    assert sorted(kept + left_out) == sorted(t.key for g in groups for e in g for t in e.transitions)
    assert all(record.dropped is not None and record.weight == 0 for record in prepared.dropped)
    by_key = {t.key: (t, e) for g in groups for e in g for t in e.transitions}
    for batch in prepared.batches.values():
        assert batch.offsets[-1] == len(batch.tokens_T)
        assert batch.response_offsets[-1] == len(batch.behaviour_logprobs_R) == len(batch.mask_R)
        for i, key in enumerate(batch.keys):
            transition, of = by_key[key]
            tokens = batch.tokens_T[batch.offsets[i] : batch.offsets[i + 1]]
            assert tokens.tolist() == [*transition.prompt_ids.tolist(), *transition.response_ids.tolist()]
            assert batch.prompt_lengths_N[i] == len(transition.prompt_ids)
            assert batch.values_N[i] == of.terminal
            assert transition.agent == "solver"


def test_a_masked_token_may_have_any_log_probability() -> None:
    """It is none of the policy's, so nothing that is recorded of it counts."""
    logprobs, mask = np.array([-1.0, np.nan, -np.inf], np.float32), np.array([True, False, False])
    calls = [make.call(0, make.choice(logprobs=logprobs, mask=mask)), make.call(1)]
    prepared = make_batches([[built("r", calls)]], BatchPlan(IDENTICAL))
    assert prepared.dropped == ()
    assert prepared.batches["default"].mask_R.tolist() == [True, False, False, True, True, True]


def test_a_groups_weight_is_that_of_its_transitions_in_every_batch() -> None:
    lost = [episode("x", [2], 1.0, dropped=DropReason.ENDING), episode("y", [2], 0.0)]
    groups = [
        lost,
        [conversation("a", 1.0), conversation("b", 0.0)],
        [episode("c", [1], 1.0), episode("d", [1, 1], 0.0)],
    ]
    credit = {name: PolicyCredit("identical", identical, CreditKind.RETURN) for name in ("author", "judge", "default")}

    batches = make_batches(groups, BatchPlan(credit, min_group_size=2), weights=[5.0, 0.5, 0.25]).batches

    assert {name: batch.weight_N.tolist() for name, batch in batches.items()} == {
        "author": [0.5] * 4,
        "judge": [0.5] * 4,
        "default": [0.25] * 3,
    }
    assert make_batches(groups, BatchPlan(credit)).batches["judge"].weight_N.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("truncated", "trained", "dropped"),
    [
        ("keep", {"a": 2, "b": 2, "c": 2}, {}),
        ("mask", {"a": 1, "b": 2, "c": 2}, {}),
        ("drop", {"b": 2, "c": 2}, {DropReason.TRUNCATED: 1}),
    ],
)
def test_what_the_token_limit_cut_off_is_kept_masked_or_dropped(
    truncated: Literal["keep", "mask", "drop"], trained: dict[str, int], dropped: dict[DropReason, int]
) -> None:
    """The limit cut a trained agent's call of `a` off; that of `c` is another agent's."""
    cut = make.choice(finish_reason=FinishReason.LENGTH)
    rollouts = {name: [make.call(i, rollout=name, agent="solver") for i in range(2)] for name in "abc"}
    rollouts["a"][1] = make.call(1, cut, rollout="a", agent="solver")
    rollouts["c"].append(make.call(2, cut, rollout="c", agent="judge"))
    group = [built(name, calls) for name, calls in rollouts.items()]

    step = make_batches([group], BatchPlan(IDENTICAL, ["solver"], truncated=truncated))

    assert Counter(key.rollout for key in step.batches["default"].keys) == trained
    assert step.episodes_dropped == dropped
    cut_off = {record.rollout for record in step.dropped if record.dropped is DropReason.TRUNCATED}
    assert cut_off == (set() if truncated == "keep" else {"a"})


def conversation(name: str, terminal: float) -> Episode:
    """A writer, a critic and an editor by turns; writer and editor have one policy, the critic its own."""
    turns = [("writer", "author"), ("critic", "judge"), ("editor", "author"), ("critic", "judge")]
    calls = [make.call(i, rollout=name, agent=agent, policy=policy) for i, (agent, policy) in enumerate(turns)]
    return built(name, calls, terminal)


def numbered(episodes: Sequence[Episode]) -> list[list[float]]:
    """A rule that tells which transitions it saw: 100 times how many, and the place."""
    total = sum(len(episode.transitions) for episode in episodes)
    return [[100.0 * total + i for i in range(len(episode.transitions))] for episode in episodes]


def test_each_policy_takes_rewards_or_returns_by_its_own_rule_over_the_whole_group() -> None:
    credit = {
        "author": PolicyCredit("numbered", numbered, CreditKind.REWARD),
        "judge": PolicyCredit("identical", identical, CreditKind.RETURN),
    }
    groups = [[conversation("a", 1.0), conversation("b", 0.0)]]
    batches = make_batches(groups, BatchPlan(credit)).batches
    assert list(batches) == ["author", "judge"]
    author, judge = batches.values()
    assert (author.kind, judge.kind) == (CreditKind.REWARD, CreditKind.RETURN)
    # The judge's rewards are beside the author's, and not the other way round.
    assert author.values_N.tolist() == [800.0, 802.0] * 2
    assert [[call.reward for call in of_rollout] for of_rollout in author.calls] == [[800.0, 801.0, 802.0, 803.0]] * 2
    assert not judge.calls
    assert judge.values_N.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert (author.turn_N.tolist(), judge.turn_N.tolist()) == ([0, 2, 0, 2], [1, 3, 1, 3])
    # A policy whose agents are not trained has no batch, and its credit is recorded.
    prepared = make_batches(groups, BatchPlan(credit, ["writer", "ed*"]))
    assert list(prepared.batches) == ["author"]
    untrained = [(f"{name}-c{turn}", value) for name, value in (("a", 1.0), ("b", 0.0)) for turn in (1, 3)]
    assert [(record.call, record.credit) for record in prepared.dropped] == untrained
    assert {record.dropped for record in prepared.dropped} == {DropReason.UNTRAINED_AGENT}


def test_calls_stand_at_the_number_of_their_rollout_also_where_a_policy_made_none() -> None:
    alone = built("b", [make.call(i, rollout="b", agent="critic", policy="judge") for i in range(2)], 0.0)
    group = [conversation("a", 1.0), alone, conversation("c", 0.0)]

    def by_member(episodes: Sequence[Episode]) -> list[list[float]]:
        return [[100.0 * n + i for i in range(len(of.transitions))] for n, of in enumerate(episodes)]

    credit = PolicyCredit("by member", by_member, CreditKind.REWARD)
    batches = make_batches([group], BatchPlan(dict.fromkeys(("author", "judge"), credit))).batches
    assert [len(batch.calls) for batch in batches.values()] == [2, 3]
    for batch in batches.values():
        for number, turn, value in zip(batch.rollout_N, batch.turn_N, batch.values_N, strict=True):
            assert {call.turn: call.reward for call in batch.calls[number]}[turn] == value


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (lambda group: [[1 / 0]], r"failed on group g: ZeroDivisionError: division by zero\. Fix the rule"),
        (lambda group: [[1.0]], r"gave \[1\] values for episodes of \[2\]"),
    ],
)
def test_a_credit_rule_that_fails_is_named(rule: Any, problem: str) -> None:
    with pytest.raises(PluginError, match=f"'broken' {problem}"):
        PolicyCredit("broken", rule, CreditKind.RETURN).values([episode("a", [1, 1], 1.0)])


def batch_of(*lengths: tuple[int, int]) -> Batch:
    """Transitions of one rollout with these prompt and response lengths, all tokens and log-probabilities different."""
    tokens, logprobs, rows = iter(range(1000)), iter(range(-1, -1000, -1)), []
    for index, (prompt, response) in enumerate(lengths):
        ids = [next(tokens) for _ in range(prompt + response)]
        rows.append(Row(ids[:prompt], ids[prompt:], [next(logprobs) for _ in range(response)], index + 0.5))
    turns = np.arange(len(rows))
    keys = tuple(TransitionKey("r", 0, f"c{turn}", 0) for turn in turns)
    return replace(engines.batch_of(rows), rollout_N=np.zeros_like(turns), turn_N=turns, keys=keys)


def test_what_cannot_be_trained_on_is_left_out_with_its_reason() -> None:
    batch = replace(
        batch_of((2, 0), (2, 2), (5, 4), (2, 1), (2, 1), (0, 1)),
        mask_R=np.array([False, False, True, True, True, True, True, True, True]),
        values_N=np.array([0.0, 0, 0, np.nan, 0, 0]),
    )
    expected = (
        DropReason.EMPTY_RESPONSE,
        DropReason.FULLY_MASKED,
        DropReason.TOO_LONG,
        DropReason.NON_FINITE,
        None,
        DropReason.EMPTY_RESPONSE,
    )
    assert filter_trainable(batch, context_length=8, vocabulary=1000).dropped == expected
    wider = filter_trainable(batch, context_length=9, vocabulary=19)
    assert wider.dropped[2:5] == (None, DropReason.NON_FINITE, DropReason.NON_FINITE)
    batch.grammar_N[[2, 4]] = '{"json_object": true}'
    assert filter_trainable(batch, context_length=8).dropped[2:] == expected[2:]
    held = filter_trainable(batch, context_length=8, vocabulary=1000, grammars=False)
    assert held.dropped == (*expected[:4], DropReason.CONSTRAINED, expected[5])
    usable = filter_trainable(batch, context_length=8, vocabulary=1000)
    assert usable.places.tolist() == [4]
    assert usable.dropped == expected
    assert usable.batch.tokens_T.tolist() == [18, 19, 20]


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("values_N", np.inf),
        ("temperature_N", 0.0),
        ("temperature_N", np.nan),
        ("weight_N", -0.5),
        ("weight_N", np.inf),
        ("behaviour_logprobs_R", np.nan),
        ("tokens_T", -1),
    ],
)
def test_one_wrong_number_costs_its_transition_alone(field: str, bad: float) -> None:
    batch = batch_of((1, 1), (1, 1), (1, 1))
    numbers = getattr(batch, field).copy()
    numbers[3 if field == "tokens_T" else 1] = bad
    usable = filter_trainable(replace(batch, **{field: numbers}), context_length=8, vocabulary=1000)
    assert usable.dropped == (None, DropReason.NON_FINITE, None)


def test_a_subset_keeps_what_belongs_to_its_transitions() -> None:
    batch = batch_of((2, 3), (1, 2), (3, 1))
    part = subset(batch, np.array([2, 0]))
    assert part.tokens_T.tolist() == [8, 9, 10, 11, 0, 1, 2, 3, 4]
    assert part.behaviour_logprobs_R.tolist() == [-6, -1, -2, -3]
    assert part.offsets.tolist() == [0, 4, 9]
    assert part.values_N.tolist() == [2.5, 0.5]
    assert [key.call for key in part.keys] == ["c2", "c0"]


def test_rewards_of_calls_that_are_left_out_stay_in_time() -> None:
    calls = [[Moment(turn, (), turn + 0.5) for turn in range(3)]]
    batch = replace(batch_of((1, 1), (1, 0), (1, 1)), kind=CreditKind.REWARD, calls=calls)
    usable = filter_trainable(batch, context_length=8, vocabulary=1000).batch
    assert (usable.values_N.tolist(), usable.turn_N.tolist(), usable.calls) == ([0.5, 2.5], [0, 2], calls)
