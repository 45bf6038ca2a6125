"""The arrays and the chains of transitions that an update works on, whatever engine makes it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agl_algorithms.grpo import Grpo, GrpoOptions
from agl_algorithms.policy_gradient import Samples
from agl_algorithms.prepared import PreparedBatch, lineages, minibatches, prepare, samples_of
from agl_algorithms.reinforce import Reinforce, ReinforceOptions
from agl_core import kinds
from agl_core.builtin import discounted, identical
from agl_core.learning.batch import BatchPlan, PolicyCredit, filter_trainable, make_batches
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.testing.engines import Row, batch_of
from agl_core.types import Batch, CreditKind, DropReason, FinishReason, Reward, ToolResult, ToolStatus

GRPO = Grpo(GrpoOptions(beta=0.0))


def rows_of(values: list[float], rollouts: list[int] | None = None) -> Batch:
    """Transitions of one group, prompt and response of two tokens each."""
    batch = batch_of([Row((0, 1), (2, 3), (-1.0, -1.0), value) for value in values])
    return batch if rollouts is None else replace(batch, rollout_N=np.array(rollouts))


def prepared_of(batch: Batch, algorithm: Grpo = GRPO) -> PreparedBatch:
    usable = filter_trainable(batch, context_length=16, vocabulary=1000)
    return prepare(usable, samples_of(usable.batch), algorithm)


def test_each_named_reward_is_normalised_before_the_sum() -> None:
    """GDPO by hand: a right answer without the form and the form without it have one sum, and other advantages."""
    pairs = [[(1.0, 0.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)], [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (0.0, 0.0)]]
    tokens, logprobs = np.zeros(2, np.int32), np.zeros(2, np.float32)
    groups = [
        [
            make.episode(
                make.transition(rollout=id, prompt_ids=tokens, response_ids=tokens, logprobs=logprobs),
                rollout=id,
                rewards=(Reward(id, 0, "right", right, "right"), Reward(id, 0, "form", form, "form")),
                terminal=right + 0.5 * form,
            )
            for member, (right, form) in enumerate(group)
            for id in [f"g{number}m{member}"]
        ]
        for number, group in enumerate(pairs)
    ]
    credit = PolicyCredit("identical", identical, CreditKind.RETURN, {"form": 0.5})
    batch = make_batches(groups, BatchPlan({"default": credit})).batches["default"]
    advantages = prepared_of(batch, Grpo(GrpoOptions(normalize="each"))).result(1, {}).advantage_N
    rewards = np.array(pairs)
    each = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    sums = (each @ [1.0, 0.5]).ravel()
    deviation = np.repeat(sums, 2).std(ddof=1)  # Over tokens, of which each response has two.
    np.testing.assert_allclose(advantages, (sums - sums.mean()) / deviation, atol=1e-5)
    assert advantages[0] > 0 > advantages[1]


UNTRAINABLE: dict[str, dict[str, Any]] = {
    "trained": {},
    "aborted": {"finish_reason": FinishReason.ABORTED},
    "no ids": {"prompt_ids": None, "response_ids": None},
    "empty": {"response_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)},
    "too long": {"prompt_ids": np.zeros(99, np.int32)},
    "cut off": {"finish_reason": FinishReason.LENGTH},
}


@pytest.mark.parametrize(("rule", "options"), [(identical, {}), (discounted, {"gamma": 0.5})])
@settings(max_examples=15)
@given(members=st.lists(st.tuples(st.integers(-2, 2), st.sampled_from(list(UNTRAINABLE))), min_size=2, max_size=5))
def test_a_rollout_that_cannot_be_trained_on_is_compared_all_the_same(
    rule: Any, options: dict[str, float], members: list[tuple[int, str]]
) -> None:
    """In its group's mean and deviation, whoever finds that it cannot: the trainer, or the engine by its limits."""
    tokens, logprobs = np.zeros(2, np.int32), np.zeros(2, np.float32)
    sampled: dict[str, Any] = {"prompt_ids": tokens, "response_ids": tokens, "logprobs": logprobs}
    group = [
        make.episode(
            make.transition(rollout=f"r{member}", **sampled | UNTRAINABLE[fate]),
            rollout=f"r{member}",
            terminal=float(value),
        )
        for member, (value, fate) in enumerate(members)
    ]
    credit = PolicyCredit("rule", partial(rule, **options), CreditKind.RETURN)
    batches = make_batches([group], BatchPlan({"default": credit}, truncated="mask")).batches
    assert bool(batches) == any(fate in ("trained", "too long") for _, fate in members)
    for batch in batches.values():
        result = prepared_of(batch, Grpo(GrpoOptions(beta=0.1))).result(1, {})
        values = np.array(rule(group, **options))[:, 0]
        advantages = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
        for key, advantage, reason in zip(batch.keys, result.advantage_N, result.dropped, strict=True):
            member = int(key.rollout[1:])
            assert (reason is None) == (members[member][1] == "trained")
            assert advantage == pytest.approx(advantages[member] if reason is None else 0.0, abs=1e-5)


@pytest.mark.parametrize("algorithm", [GRPO, Reinforce(ReinforceOptions())])
@given(values=st.lists(st.sampled_from([0.0, 0.5, 0.5, -2.0, 8.0]), min_size=1, max_size=6))
def test_advantages_of_credit_are_used_as_they_are(algorithm: Any, values: list[float]) -> None:
    """Without a mean or a deviation, of several rollouts that differ, that do not, and of one alone."""
    batch = replace(rows_of(values, rollouts=[*range(len(values))]), kind=CreditKind.ADVANTAGE)
    prepared = prepared_of(batch, algorithm)
    assert prepared.result(1, {}).advantage_N.tolist() == values
    assert prepared.advantages_R.tolist() == [value for value in values for _ in range(2)]
    assert prepared.dropped == tuple(None if value else DropReason.NO_ADVANTAGE for value in values)


_AIR = Plugins.load().component(kinds.CREDIT, "air", "[test]")
AIR = PolicyCredit("air", _AIR.build(_AIR.options(beta=0.0)), CreditKind.ADVANTAGE)
CALLS = st.lists(st.tuples(st.sampled_from(list(UNTRAINABLE)), st.sampled_from(ToolStatus)), min_size=1, max_size=3)
GROUPS = st.lists(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 1.0, 0.1, -0.5]), CALLS), min_size=1, max_size=5),
    min_size=1,
    max_size=3,
)


@given(groups=GROUPS)
def test_air_without_its_tools_is_identical(groups: list[list[tuple[float, list[tuple[str, ToolStatus]]]]]) -> None:
    """Beside the algorithm's own comparison, whoever cannot be trained on, to the update's last bits."""
    tokens, logprobs = np.zeros(2, np.int32), np.zeros(2, np.float32)
    sampled: dict[str, Any] = {"prompt_ids": tokens, "response_ids": tokens, "logprobs": logprobs}
    episodes = [
        [
            make.episode(
                *(
                    make.transition(
                        turn,
                        ToolResult(f"{turn}", id, 0, "look", status),
                        rollout=id,
                        rewards=(Reward(id, 0, "step", 0.25 * turn, "test", f"{id}-c{turn}"),),
                        **sampled | UNTRAINABLE[fate],
                    )
                    for turn, (fate, status) in enumerate(calls)
                ),
                rollout=id,
                terminal=terminal,
            )
            for member, (terminal, calls) in enumerate(group)
            for id in [f"g{number}m{member}"]
        ]
        for number, group in enumerate(groups)
    ]
    updates: list[list[PreparedBatch]] = []
    for credit in (PolicyCredit("identical", identical, CreditKind.RETURN), AIR):
        batches = make_batches(episodes, BatchPlan({"default": credit}, truncated="mask")).batches.values()
        parts = [filter_trainable(batch, context_length=16, vocabulary=1000) for batch in batches]
        updates.append([prepare(part, samples_of(part.batch, dtype=torch.float64), GRPO) for part in parts])
    for plain, air in zip(*updates, strict=True):
        torch.testing.assert_close(air.advantages_R, plain.advantages_R, rtol=0, atol=1e-9)
        torch.testing.assert_close(air.weights_R, plain.weights_R, rtol=0, atol=0)
        assert air.dropped == plain.dropped


def test_a_transition_of_weight_0_is_compared_and_gives_its_share_to_no_other() -> None:
    values = [0.0, 1.0, 3.0, 5.0]
    whole, masked = (
        prepared_of(replace(rows_of(values), weight_N=np.array(weights))).result(1, {})
        for weights in ([1.0] * 4, [1.0, 1.0, 1.0, 0.0])
    )
    assert masked.advantage_N.tolist() == whole.advantage_N.tolist()
    assert masked.weight_N.tolist() == [*whole.weight_N[:3], 0.0]
    assert masked.dropped == (None, None, None, DropReason.NO_ADVANTAGE)


def test_what_an_algorithm_makes_not_finite_weighs_nothing() -> None:
    class Broken(Grpo):
        def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
            advantages_R = super().advantages(samples, values_R)
            return advantages_R.masked_fill(samples.transition_R == 1, torch.nan)

    prepared = prepared_of(rows_of([0.0, 1.0, 1.0]), Broken(GrpoOptions(beta=0.0)))
    assert prepared.dropped == (None, DropReason.NON_FINITE, None)
    assert torch.isfinite(prepared.advantages_R).all()
    assert prepared.weights_R[2:4].tolist() == [0, 0]
    assert prepared.trained.tolist() == [0, 2]


def test_optimizer_steps_are_split_between_rollouts() -> None:
    batch = rows_of([0.0] * 9, rollouts=[0, 0, 0, 1, 1, 2, 2, 3, 3])
    chosen = np.array([0, 2, 3, 4, 5, 7, 8])
    split = minibatches(batch, chosen, 2, [5, 1])
    assert len(split) == 2
    assert sorted(np.concatenate(split).tolist()) == chosen.tolist()
    assert not set(batch.rollout_N[split[0]].tolist()) & set(batch.rollout_N[split[1]].tolist())
    assert [part.tolist() for part in minibatches(batch, chosen, 2, [5, 1])] == [part.tolist() for part in split]
    assert len(minibatches(batch, np.array([0, 1, 2]), 3, [5, 1])) == 1, "one rollout makes one step"
    assert minibatches(batch, chosen[:0], 1, [5, 1]) == []


def by_transition(weights_R: Tensor) -> list[float]:
    return samples_of(rows_of([0.0] * (len(weights_R) // 2))).sums(weights_R).tolist()


def test_each_step_weighs_as_much_as_the_whole() -> None:
    prepared = prepared_of(rows_of([0.0, 1.0, 1.0], rollouts=[0, 0, 1]))
    steps = [np.array([0, 2]), np.array([1])]
    weights_R = prepared.step_weights(prepared.weights_R, steps)
    assert by_transition(weights_R) == pytest.approx([1 / 3, 1.0, 2 / 3]), "the first two share a rollout's half"
    assert by_transition(prepared.step_weights(prepared.weights_R, steps[1:])) == [0.0, 1.0, 0.0]
    nothing_R = torch.zeros_like(prepared.weights_R)
    assert not prepared.step_weights(nothing_R, steps).any()


def test_a_correction_multiplies_what_a_transition_counts_in_its_step_and_nothing_else() -> None:
    plain = rows_of([0.0, 1.0, 0.0, 1.0])
    corrections = np.array([1.0, 0.02, 3.0, 0.5])
    corrected = replace(plain, weight_N=corrections)
    for steps in ([np.arange(4)], [np.array([0, 1]), np.array([2, 3])], [np.array([i]) for i in range(4)]):
        before, after = (
            np.array(by_transition(prepared.step_weights(prepared.weights_R, steps)))
            for prepared in (prepared_of(plain), prepared_of(corrected))
        )
        assert after == pytest.approx(corrections * before)
    assert prepared_of(corrected).result(1, {}).weight_N == pytest.approx(corrections / 4)


FEW_IDS = st.integers(0, 2)
"""So few that conversations are often equal by chance."""
NEWS = st.lists(FEW_IDS, min_size=0, max_size=3)
REPLY = st.lists(FEW_IDS, min_size=1, max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> Batch:
    """Rollouts whose calls go on from any earlier state of the conversation (sub-agents, branches, samples of one
    prompt), from an edited or cut one (edits, summaries), or begin anew."""
    rows, rollout_N, temperature_N = [], [], []
    for rollout in range(draw(st.integers(1, 3))):
        states: list[list[int]] = [[]]
        for _ in range(draw(st.integers(1, 8))):
            state = list(draw(st.sampled_from(states)))
            if state and draw(st.booleans()):
                cut = draw(st.integers(0, len(state) - 1))
                state[cut:] = draw(st.sampled_from([[], [draw(FEW_IDS)], state[cut:]]))
            prompt, reply = [*state, *draw(NEWS)] or [0], draw(REPLY)
            states.append([*prompt, *reply])
            rows.append(Row(prompt, reply, [-1.0] * len(reply), 0.0))
            rollout_N.append(rollout)
            temperature_N.append(draw(st.sampled_from([1.0, 1.0, 0.5])))
    return replace(
        batch_of(rows), rollout_N=np.array(rollout_N), temperature_N=np.array(temperature_N, dtype=np.float32)
    )


def tokens(batch: Batch, i: int) -> list[int]:
    return batch.tokens_T[batch.offsets[i] : batch.offsets[i + 1]].tolist()


def prompt(batch: Batch, i: int) -> list[int]:
    return tokens(batch, i)[: batch.prompt_lengths_N[i]]


def continues(batch: Batch, one: int, other: int) -> bool:
    """True if `other` could follow `one` in a chain."""
    alike = batch.rollout_N[one] == batch.rollout_N[other] and batch.temperature_N[one] == batch.temperature_N[other]
    before = tokens(batch, one)
    return bool(alike) and prompt(batch, other)[: len(before)] == before


@given(conversations(), st.data())
def test_chains_are_exact_and_none_can_be_longer(batch: Batch, data: st.DataObject) -> None:
    dropped = data.draw(st.sets(st.integers(0, len(batch) - 1), max_size=len(batch) - 1))
    chosen = np.array([i for i in range(len(batch)) if i not in dropped])
    chains = [chain.tolist() for chain in lineages(batch, chosen)]
    assert sorted(i for chain in chains for i in chain) == chosen.tolist(), "each is in one chain"
    for chain in chains:
        for one, other in itertools.pairwise(chain):
            assert continues(batch, one, other)
    ends = [chain[-1] for chain in chains]
    for chain in chains:
        assert not [end for end in ends if continues(batch, end, chain[0])], "a chain that could go on does"
        for one, other in itertools.pairwise(chain):
            better = [e for e in ends if continues(batch, e, other) and len(tokens(batch, e)) > len(tokens(batch, one))]
            assert not better, "the longest chain goes on"


def test_the_longest_chain_goes_on() -> None:
    calls = [
        Row(prompt, reply, [-1.0] * len(reply), 0.0)
        for prompt, reply in (([0], [1, 1]), ([0], [1]), ([0, 1, 1, 2], [3]))
    ]
    batch = replace(batch_of(calls), rollout_N=np.zeros(3, np.int64))
    assert [chain.tolist() for chain in lineages(batch, np.arange(3))] == [[1], [0, 2]]


@given(conversations(), st.integers(1, 4), st.integers(0, 9))
def test_a_chain_is_of_one_optimizer_step(batch: Batch, count: int, seed: int) -> None:
    everything = np.arange(len(batch))
    steps = minibatches(batch, everything, count, [seed])
    for chain in lineages(batch, everything):
        assert sum(bool(np.isin(chain, step).any()) for step in steps) == 1
