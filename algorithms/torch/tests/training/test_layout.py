"""Transitions in forward passes: what is computed must not depend on how they are laid out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl_torch import batching
from agl_torch.batching import lay_out, plan, score
from agl_torch.model import LoadedModel

from .conftest import make_batch, plain_logprobs

CPU = torch.device("cpu")


@given(st.integers(0, 20), st.integers(1, 200))
def test_every_transition_is_planned_once_within_the_budget(seed: int, budget: int) -> None:
    batch = make_batch(None, seed=seed)
    chosen = np.flatnonzero(np.arange(len(batch)) % 3 != 1)
    lengths = np.diff(batch.offsets)
    parts = plan(batch, chosen, token_budget=budget, vocabulary=320)
    assert sorted(np.concatenate(parts).tolist()) == chosen.tolist()
    for part in parts:
        assert len(part) == 1 or len(part) * lengths[part].max() <= budget
        assert lengths[part].min() >= batching.SHORTEST_SHARE * lengths[part].max()


def test_logits_bound_a_micro_batch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(None)
    monkeypatch.setattr(batching, "LOGITS_PER_MICRO_BATCH", 320 * 12)
    for part in plan(batch, np.arange(len(batch)), token_budget=10_000, vocabulary=320):
        assert len(part) == 1 or batch.response_lengths_N[part].sum() <= 12


def test_scores_equal_a_plain_forward_of_each_transition(in_float64: LoadedModel) -> None:
    batch = make_batch(None)
    for part in plan(batch, np.arange(len(batch)), token_budget=150, vocabulary=320):
        micro = lay_out(batch, part, CPU)
        with torch.no_grad():
            logprobs, entropy = score(in_float64.model, micro)
        for local, i in enumerate(part):
            mine = logprobs[micro.transition_R == local]
            with torch.no_grad():
                torch.testing.assert_close(mine, plain_logprobs(in_float64.model, batch, int(i)), rtol=1e-9, atol=1e-9)
        assert micro.tokens == np.diff(batch.offsets)[part].sum()
        assert (entropy > 0).all()
        assert (entropy < np.log(320)).all()


def test_logits_exist_at_response_positions_only(loaded: LoadedModel) -> None:
    batch = make_batch(None)
    micro = lay_out(batch, np.arange(3), CPU)
    seen: list[torch.Size] = []
    hook = loaded.model.get_output_embeddings().register_forward_hook(lambda *call: seen.append(call[2].shape))
    score(loaded.model, micro)
    hook.remove()
    assert seen == [torch.Size([int(batch.response_lengths_N[:3].sum()), 320])]
    assert loaded.model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 320)


def test_entropy_of_a_uniform_distribution(in_float64: LoadedModel) -> None:
    in_float64.model.get_output_embeddings().weight.data.zero_()
    with torch.no_grad():
        logprobs, entropy = score(in_float64.model, lay_out(make_batch(None), np.arange(2), CPU))
    torch.testing.assert_close(entropy, torch.full_like(entropy, np.log(320)))
    torch.testing.assert_close(logprobs, torch.full_like(logprobs, -np.log(320)))
