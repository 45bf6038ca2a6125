"""Chains of transitions: in any conversations, each call of a chain has exactly the tokens of its row before it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agl_algorithms.prepared import lineages, minibatches
from agl_core.learning.batch import subset
from agl_core.testing.engines import Row, batch_of
from agl_core.types import Batch

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


@given(conversations(), st.integers(1, 4), st.integers(0, 9))
def test_a_chain_is_of_one_optimizer_step(batch: Batch, count: int, seed: int) -> None:
    everything = np.arange(len(batch))
    steps = minibatches(batch, everything, count, [seed])
    for chain in lineages(batch, everything):
        assert sum(bool(np.isin(chain, step).any()) for step in steps) == 1


def test_a_sub_agents_calls_are_a_chain_of_their_own() -> None:
    """A conversation, a sub-agent in the middle of it, and a summary at its end."""
    rows = [
        Row([1], [2], [-1.0], 0.0),
        Row([7, 7], [8], [-1.0], 0.0),
        Row([1, 2, 3], [4], [-1.0], 0.0),
        Row([7, 7, 8, 9], [6], [-1.0], 0.0),
        Row([1, 2, 3, 4, 5], [6], [-1.0], 0.0),
        Row([1, 9], [6], [-1.0], 0.0),
    ]
    batch = replace(batch_of(rows), rollout_N=np.zeros(6, np.int64))
    assert [chain.tolist() for chain in lineages(batch, np.arange(6))] == [[0, 2, 4], [1, 3], [5]]
    without_the_second = lineages(batch, np.array([0, 4]))
    assert [chain.tolist() for chain in without_the_second] == [[0, 4]], "what is dropped in between is prompt"
    assert len(lineages(subset(batch_of(rows), np.array([0, 2])), np.arange(2))) == 2, "rollouts share no row"
