"""The same batch makes the same update under both engines; rows without weight make none. Needs veRL, but no Ray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import parity
import pytest
import torch
import verl_bench

from agl_core.learning.screening import screen

POLICY = Path(__file__).resolve().parents[3] / "examples" / "calc" / "policy"


@pytest.mark.parametrize("name", parity.CASES)
def test_both_engines_make_the_same_update(name: str) -> None:
    found = parity.distance(POLICY, parity.CASES[name])
    assert found.same_dropped
    assert found.advantages <= 1e-6
    assert found.weights <= 1e-6
    assert found.loss <= 1e-5
    assert found.cosine >= 0.9999
    assert found.norm <= 1e-3


def test_rows_without_weight_have_no_gradient() -> None:
    """Pad rows, and transitions that the algorithm leaves out: whatever their advantages say."""
    bench = verl_bench.VerlBench(POLICY, "grpo", {"beta": 0})
    batch = verl_bench.recorded_batch(parity.VOCABULARY)
    whole = screen(batch, context_length=verl_bench.TOO_LONG, vocabulary=parity.VOCABULARY).batch
    data = bench.rows(whole, np.arange(len(whole)), pads=3)
    data["old_log_probs"] = verl_bench.nested(bench.infer(bench.actor, data, "log_probs"))
    lengths = [len(row) for row in data["response_mask"].unbind()]
    data["advantages"] = verl_bench.nested([torch.full((length,), 5.0) for length in lengths])
    data["loss_weights"] = verl_bench.nested([torch.zeros(length) for length in lengths])
    before = bench.parameters(bench.actor)
    measured = bench.train(bench.actor, data, 1, 1.0)
    assert measured["grad_norm"] == 0.0
    after = bench.parameters(bench.actor)
    assert all(torch.equal(before[name], after[name]) for name in before)

    weighted = [torch.zeros(length) for length in lengths]
    weighted[0] += 0.1
    data["loss_weights"] = verl_bench.nested(weighted)
    assert bench.train(bench.actor, data, 1, 1.0)["grad_norm"] > 0, "one row with a weight has a gradient"


def test_pads_change_nothing() -> None:
    """As many pad rows as veRL likes: the parameters move as without them."""
    batch = verl_bench.recorded_batch(parity.VOCABULARY)
    changes = [
        verl_bench.VerlBench(POLICY, "grpo", {"beta": 0}).update(batch, parity.VOCABULARY, pads=pads).change
        for pads in (0, 6)
    ]
    torch.testing.assert_close(changes[0], changes[1], rtol=1e-3, atol=1e-6)
