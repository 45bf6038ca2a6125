"""Transitions in forward passes: what is computed must not depend on how they are laid out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import CohereConfig, CohereForCausalLM

from agl_core.testing.engines import Row, batch_of
from agl_core.types import Batch
from agl_torch import batching
from agl_torch.batching import Limits, MicroBatch, micro_batches, score
from agl_torch.loading import LoadedModel

from .conftest import CPU, make_batch, plain_logits, plain_logprobs, tokens_of

WIDE = Limits(tokens=10_000, vocabulary=320, hidden_size=10_000)
"""Nothing but shared prefixes decides about the layout."""


def make_shared(seed: int, *, groups: int = 2, members: int = 4, turns: int = 3, alphabet: int = 300) -> Batch:
    """Rollouts whose turns continue each other, and groups that share their prompts. Few letters: more is shared."""
    rng = np.random.default_rng(seed)

    def some(most: int) -> list[int]:
        return [int(token) for token in rng.integers(3, 3 + alphabet, int(rng.integers(1, most)))]

    pairs: list[tuple[list[int], list[int]]] = []
    for _ in range(groups):
        task = some(30)
        for _ in range(members):
            prompt = list(task)
            for _ in range(int(rng.integers(1, turns + 1))):
                pairs.append((prompt, some(8)))
                prompt = prompt + pairs[-1][1] + some(10)
    return batch_at([pairs[i] for i in rng.permutation(len(pairs))], rng)


def make_long() -> Batch:
    """Two long rollouts of a prompt, and two that go on from the first turn of a third."""
    rng = np.random.default_rng(0)
    task, turn, *rest = (rng.integers(3, 303, length).tolist() for length in (90, 50, 70, 80, 90, 60))
    return batch_at([(task, rest[0]), (task, rest[1]), (task + turn, rest[2]), (task + turn, rest[3])], rng)


def batch_at(pairs: list[tuple[list[int], list[int]]], rng: np.random.Generator) -> Batch:
    """Prompts and responses at several temperatures."""
    batch = batch_of([Row(prompt, response, [0.0] * len(response), 0.0) for prompt, response in pairs])
    return replace(batch, temperature_N=rng.choice([0.7, 1.0, 1.3], len(pairs)).astype(np.float32))


def computed(micro: MicroBatch) -> int:
    """The tokens of a pass that are no pads: no batch here has the id 0."""
    return int(micro.input_ids.count_nonzero())


def laid_out(batch: Batch, limits: Limits = WIDE) -> list[MicroBatch]:
    return list(micro_batches(batch, np.arange(len(batch)), limits, CPU))


def of_transitions(batch: Batch, micro: MicroBatch, values_R: Tensor) -> list[Tensor]:
    """The values of each transition of a pass."""
    return list(values_R.split(batch.response_lengths_N[micro.transitions_n].tolist()))


@given(st.integers(0, 30), st.integers(1, 200), st.integers(1, 1000), st.booleans())
def test_every_transition_is_in_one_pass_within_the_limits(seed: int, budget: int, hidden: int, shares: bool) -> None:
    batch = make_shared(seed) if shares else make_batch(None, seed=seed)
    chosen = np.flatnonzero(np.arange(len(batch)) % 3 != 1)
    passes = list(micro_batches(batch, chosen, Limits(budget, 320, hidden), CPU))
    assert sorted(int(i) for micro in passes for i in micro.transitions_n) == chosen.tolist()
    for micro in passes:
        rows, longest = micro.input_ids.shape
        assert rows * longest <= budget or len(micro.transitions_n) == 1
        assert computed(micro) >= rows * longest * batching.SMALLEST_SHARE
        assert computed(micro) <= micro.tokens
        assert micro.tokens == np.diff(batch.offsets)[micro.transitions_n].sum()


@given(st.integers(0, 1000), st.sampled_from([2, 5, 300]))
def test_a_shared_prefix_is_computed_once(seed: int, alphabet: int) -> None:
    batch = make_shared(seed, groups=1, alphabet=alphabet)
    [micro] = laid_out(batch)
    sequences = [tuple(tokens_of(batch, i).tolist()) for i in range(len(batch))]
    prefixes = {s[:end] for s in sequences for end in range(1, len(s) + 1)}
    assert computed(micro) == len(prefixes)


def test_a_prefix_is_shared_where_that_pays() -> None:
    """A large model shares even a short prefix, a small one a long prefix only, a model without branches none."""
    rng = np.random.default_rng(0)

    def rows(prompt: int, hidden_size: int | None) -> list[int]:
        task = rng.integers(10, 300, prompt).tolist()
        batch = batch_at([(task, [7, *rng.integers(10, 300, 30).tolist(), end]) for end in (7, 8)], rng)
        return [len(micro.input_ids) for micro in laid_out(batch, replace(WIDE, hidden_size=hidden_size))]

    assert rows(10, 4096) == rows(300, 4096) == rows(300, 64) == [1]
    assert rows(10, 64) == rows(10, None) == rows(300, None) == [2]


@pytest.mark.parametrize("limits", [WIDE, replace(WIDE, tokens=150), replace(WIDE, hidden_size=None)])
@pytest.mark.parametrize(
    "batch",
    [make_batch(None), make_long(), *(make_shared(seed, alphabet=300 if seed % 2 else 3) for seed in range(1, 6))],
)
def test_scores_equal_a_plain_forward_of_each_transition(in_float64: LoadedModel, limits: Limits, batch: Batch) -> None:
    for micro in laid_out(batch, limits):
        with torch.no_grad():
            logprobs, entropy, _ = score(in_float64.model, micro)
        for local, i in enumerate(micro.transitions_n.tolist()):
            with torch.no_grad():
                plain = plain_logprobs(in_float64.model, batch, i)
            torch.testing.assert_close(of_transitions(batch, micro, logprobs)[local], plain, rtol=1e-9, atol=1e-9)
        assert (entropy > 0).all()
        assert (entropy < np.log(320)).all()


@pytest.mark.parametrize("batch", [make_shared(3), make_long()], ids=["short", "long"])
def test_gradients_equal_those_of_each_transition_alone(in_float64: LoadedModel, batch: Batch) -> None:
    weights = torch.randn(int(batch.response_offsets[-1]), dtype=torch.float64)

    def gradient(passes: list[MicroBatch]) -> torch.Tensor:
        in_float64.model.zero_grad()
        for micro in passes:
            (score(in_float64.model, micro).logprobs_R * weights[micro.tokens_R]).sum().backward()
        return torch.cat([p.grad.flatten() for p in in_float64.model.parameters()])

    alone = [micro for i in range(len(batch)) for micro in micro_batches(batch, np.array([i]), WIDE, CPU)]
    together = laid_out(batch)
    assert sum(map(computed, together)) < 0.7 * sum(map(computed, alone))
    expected = gradient(alone)
    # The model's own norms compute in float32, and with them the backward pass.
    assert (gradient(together) - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("logit_scale", [None, 0.0625])
def test_logits_in_parts_give_the_same_scores_and_gradients(
    in_float64: LoadedModel, monkeypatch: pytest.MonkeyPatch, logit_scale: float | None
) -> None:
    """In parts where the output layer is all there is, whole where the model changes its logits afterwards."""
    model = in_float64.model
    if logit_scale is not None:
        config = CohereConfig(
            vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            logit_scale=logit_scale, max_position_embeddings=256,
        )  # fmt: skip
        model = CohereForCausalLM(config).double().eval()
    [micro] = laid_out(make_shared(3, groups=1), replace(WIDE, tokens=100_000))
    weights, entropy_weights = torch.randn(2, len(micro.targets_R), dtype=torch.float64)

    def scored() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        rows: list[int] = []
        hook = model.get_output_embeddings().register_forward_hook(lambda *call: rows.append(len(call[2])))
        model.zero_grad()
        scores = score(model, micro, entropy_gradient=True)
        hook.remove()
        (scores.logprobs_R * weights + scores.entropy_R * entropy_weights).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        return scores.logprobs_R.detach(), scores.entropy_R.detach(), gradient, rows

    *whole, rows = scored()
    assert rows == [len(micro.targets_R)]
    monkeypatch.setattr(batching, "LOGITS_AT_ONCE", 5 * 320)
    *in_parts, rows = scored()
    assert (max(rows) <= 5) == (logit_scale is None)
    torch.testing.assert_close(in_parts, whole)


def test_the_most_likely_tokens_are_those_of_a_plain_forward(in_float64: LoadedModel) -> None:
    batch = make_batch(None)

    def most_likely(i: int) -> torch.Tensor:
        return plain_logits(in_float64.model, batch, i).argmax(-1)

    with torch.no_grad():
        for i in range(0, len(batch), 2):  # Tokens of a random batch are hardly ever the most likely ones.
            batch.tokens_T[batch.offsets[i] + batch.prompt_lengths_N[i]] = int(most_likely(i)[0])
        for micro in laid_out(batch):
            is_top = score(in_float64.model, micro).is_top_R
            for local, i in enumerate(micro.transitions_n.tolist()):
                expected = most_likely(i) == tokens_of(batch, i)[int(batch.prompt_lengths_N[i]) :]
                assert expected[0] or i % 2
                assert of_transitions(batch, micro, is_top)[local].tolist() == expected.tolist()


@pytest.mark.parametrize("constrained", [False, True])
def test_the_gradient_of_the_entropy_is_that_of_finite_differences(in_float64: LoadedModel, constrained: bool) -> None:
    """Also of a distribution over what a grammar allows; without being asked for there is none."""
    model = in_float64.model
    [micro] = laid_out(make_shared(3, groups=1), replace(WIDE, tokens=100_000))
    torch.manual_seed(0)
    packed = None
    if constrained:
        allowed = torch.rand(len(micro.targets_R), 320) < 0.3
        allowed.scatter_(1, micro.targets_R[:, None], True)
        packed = torch.from_numpy(np.packbits(allowed.numpy(), axis=1, bitorder="little"))
    weights = torch.rand(len(micro.targets_R), dtype=torch.float64)
    shift, direction = torch.zeros(320, dtype=torch.float64, requires_grad=True), torch.randn(320, dtype=torch.float64)
    hook = model.get_output_embeddings().register_forward_hook(lambda layer, arguments, logits: logits + shift)

    def total() -> torch.Tensor:
        return (score(model, micro, packed, entropy_gradient=True).entropy_R * weights).sum()

    (gradient,) = torch.autograd.grad(total(), shift)
    ends = []
    with torch.no_grad():
        for step in (1e-5, -2e-5):
            shift.add_(step * direction)
            ends.append(float(total()))
    assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(float(gradient @ direction), rel=1e-6)
    assert not score(model, micro, packed).entropy_R.requires_grad
    hook.remove()
