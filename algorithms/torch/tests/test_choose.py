"""The choice of a token, against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agl_torch.requests import Uniforms, choose


def pick(logits: list[float], uniforms: list[float], temperature: float = 1.0, top_p: float = 1.0, forced: int = -1):
    count = len(uniforms)
    ids, logprobs = choose(
        torch.tensor([logits] * count),
        torch.full((count,), temperature),
        torch.full((count,), top_p, dtype=torch.float64),
        torch.tensor(uniforms, dtype=torch.float64),
        torch.full((count,), forced),
    )
    return ids.tolist(), logprobs.tolist()


PROBS = [0.1, 0.6, 0.0, 0.3]
LOGITS = [float(np.log(p)) if p else -1e9 for p in PROBS]


def test_draws_follow_the_probabilities() -> None:
    ids, logprobs = pick(LOGITS, np.linspace(0, 1, 1000, endpoint=False).tolist())
    assert [ids.count(i) for i in range(4)] == pytest.approx([100, 600, 0, 300], abs=1)
    assert logprobs == pytest.approx([float(np.log(PROBS[i])) for i in ids], abs=1e-6)


def test_temperature_flattens() -> None:
    squared = np.array(PROBS) ** 2 / (np.array(PROBS) ** 2).sum()
    ids, logprobs = pick(LOGITS, np.linspace(0, 1, 1000, endpoint=False).tolist(), temperature=0.5)
    assert [ids.count(i) / 1000 for i in range(4)] == pytest.approx(squared.tolist(), abs=2e-3)
    assert logprobs == pytest.approx([float(np.log(squared[i])) for i in ids], abs=1e-5)


def test_temperature_zero_takes_the_likeliest_with_its_plain_logprob() -> None:
    ids, logprobs = pick(LOGITS, [0.0, 0.99], temperature=0.0)
    assert ids == [1, 1]
    assert logprobs == pytest.approx([float(np.log(0.6))] * 2)


@pytest.mark.parametrize(("top_p", "allowed"), [(0.5, {1}), (0.6, {1}), (0.85, {1, 3}), (0.95, {0, 1, 3})])
def test_top_p_draws_from_the_nucleus_and_records_the_full_distribution(top_p: float, allowed: set[int]) -> None:
    ids, logprobs = pick(LOGITS, np.linspace(0, 1, 500, endpoint=False).tolist(), top_p=top_p)
    assert set(ids) == allowed
    assert logprobs == pytest.approx([float(np.log(PROBS[i])) for i in ids], abs=1e-6)


def test_a_forced_token_is_taken_and_scored() -> None:
    ids, logprobs = pick(LOGITS, [0.5], forced=0)
    assert ids == [0]
    assert logprobs == pytest.approx([float(np.log(0.1))])


def test_uniforms_depend_on_seed_choice_and_position_only() -> None:
    numbers = [Uniforms(3, 1)[i] for i in range(200)]
    backwards = Uniforms(3, 1)
    assert [backwards[i] for i in reversed(range(200))] == numbers[::-1]
    assert len({*numbers, *(Uniforms(3, 2)[i] for i in range(200)), *(Uniforms(4, 1)[i] for i in range(200))}) == 600
    assert all(0 <= number < 1 for number in numbers)
    assert Uniforms(-1, 0)[0] == Uniforms(2**64 - 1, 0)[0]
