"""The KL metrics against the KL of categorical distributions, every token of the vocabulary enumerated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from agl_algorithms.grpo import Grpo
from agl_algorithms.interface import Logprobs
from agl_algorithms.options import GrpoOptions

from .conftest import Row, make_samples

VOCABULARY = 7
logits = st.lists(st.floats(-3, 3), min_size=VOCABULARY, max_size=VOCABULARY).map(
    lambda values: torch.log_softmax(torch.tensor(values, dtype=torch.float64), -1)
)


def metrics(current: Tensor, behaviour: Tensor, reference: Tensor, drawn_from: Tensor) -> dict[str, Any]:
    """Each token of the vocabulary once, weighing as often as `drawn_from` samples it."""
    samples = make_samples([Row(0, token, 0.0, (True,)) for token in range(VOCABULARY)], behaviour)
    logprobs = Logprobs(current, current, behaviour, reference)
    nothing = torch.zeros_like(current)
    return dict(Grpo(GrpoOptions(beta=0.1)).loss(samples, logprobs, nothing, drawn_from.exp())[1])


def exactly(first: Tensor, second: Tensor) -> float:
    return kl_divergence(Categorical(logits=first), Categorical(logits=second)).item()


@given(logits, logits, logits)
def test_the_means_over_what_was_sampled_are_the_kls(current: Tensor, behaviour: Tensor, reference: Tensor) -> None:
    off_policy = metrics(current, behaviour, reference, drawn_from=behaviour)
    assert off_policy["kl_behaviour"].item() == pytest.approx(exactly(behaviour, current), abs=1e-9)
    on_policy = metrics(current, current, reference, drawn_from=current)
    assert on_policy["kl_reference"].item() == pytest.approx(exactly(current, reference), abs=1e-9)


def test_a_token_that_became_unlikely_does_not_make_the_kl_explode() -> None:
    behaviour = torch.log_softmax(torch.tensor([0.0] * VOCABULARY, dtype=torch.float64), -1)
    current = torch.log_softmax(torch.tensor([-12.0] + [0.0] * (VOCABULARY - 1), dtype=torch.float64), -1)
    found = metrics(current, behaviour, behaviour, drawn_from=behaviour)["kl_behaviour"].item()
    assert found == pytest.approx(exactly(behaviour, current))
    assert found < 2
