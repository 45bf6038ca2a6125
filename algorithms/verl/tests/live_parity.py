"""The same batch makes the same update under both engines; what is left out makes none. Needs veRL, but no Ray."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agl_core.testing.engines import Row, batch_of
from agl_verl.config import FUSED, MODEL
from agl_verl.rows import gather
from tests.support.recorded_batches import Kind, record

from . import parity, verl_bench
from .parity import POLICY, VOCABULARY

LEFT_OUT = tuple(kind for kind in Kind if kind is not Kind.KEPT)


@pytest.mark.parametrize("name", parity.CASES)
def test_both_engines_make_the_same_update(name: str) -> None:
    distance = parity.distance(POLICY, parity.CASES[name])
    assert distance.within, distance


@pytest.mark.parametrize("name", parity.CASES)
def test_calls_in_one_row_make_the_update_of_a_row_each(name: str) -> None:
    distance = parity.distance_of_rows(POLICY, parity.CASES[name])
    assert distance.within, distance


def test_one_optimizer_step_needs_no_scoring_before_it() -> None:
    distance = parity.distance_of_scoring(POLICY, parity.CASES["GRPO, one optimizer step"])
    assert distance.within, distance


@pytest.mark.parametrize("kind", FUSED)
def test_fused_kernels_are_the_models_own_output(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities, entropies, gradients and the most likely tokens, by the model's own forward."""
    verl_bench.one_process()
    from verl.models.transformers.monkey_patch import patch_forward_with_backends

    from agl_verl.verl_plugin import mark_top_tokens  # Which acts by the environment when it is imported.

    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads, **experts)).float()
    tokens_BT, weights_BT = torch.randint(97, (2, 11)), torch.randn(2, 11)
    inputs = {"input_ids": tokens_BT, "position_ids": torch.arange(11).expand(2, -1), "use_cache": False}

    def gradients(logprobs_BT: torch.Tensor) -> list[torch.Tensor]:
        loss = (logprobs_BT * weights_BT).sum()
        return [*torch.autograd.grad(loss, [*model.parameters()], materialize_grads=True)]

    own = torch.distributions.Categorical(logits=model(**inputs).logits / 0.8)
    expected = own.log_prob(tokens_BT.roll(-1, 1))
    monkeypatch.setattr(type(model), "forward", type(model).forward)
    patch_forward_with_backends(model, True, "torch")
    fused = model(**inputs, temperature=0.8, return_dict=True)
    torch.testing.assert_close(fused.log_probs, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(fused.entropy, own.entropy(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(fused.log_probs), gradients(expected), atol=1e-5, rtol=1e-4)
    every_other = torch.arange(11) % 2
    with mark_top_tokens():
        marked = model(**inputs, shift_labels=(own.logits.argmax(-1) + every_other) % 97, return_dict=True).log_probs
    assert torch.equal(marked > 0, (every_other == 0).expand(2, -1))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_both_engines_know_the_most_likely_tokens(fused: bool, packed: bool) -> None:
    """Each third token of a reply is another one."""
    model, rows = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32), list[Row]()
    for prompt in ([7, 8, 9], [5], [40, 3, 80, 11]):
        tokens = [*prompt]
        for place in range(8):
            top = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
            tokens.append((top + (place % 3 == 0)) % VOCABULARY)
        rows.append(Row(prompt, tokens[len(prompt) :], [-1.0] * 8, 0.0))
    batch, rows_of_verl = batch_of(rows, temperature=0.8), [*np.arange(3)[:, None], None]
    settings = (f"{MODEL}.use_fused_kernels={fused}", f"{MODEL}.use_remove_padding={packed}")
    by_verl = verl_bench.VerlBench(POLICY, "sft", {}, overrides=settings)
    from agl_verl.verl_plugin import mark_top_tokens

    with mark_top_tokens():
        logprobs = by_verl.infer(by_verl.actor, by_verl.rows(batch, rows_of_verl), "log_probs")
    marked_R = gather(batch, logprobs, rows_of_verl).numpy()
    by_torch = verl_bench.TorchBench(POLICY, "sft", {})._trainer.logprobs(batch)
    assert (marked_R >= 0).tolist() == by_torch.is_top_R.tolist() == [place % 3 > 0 for place in range(8)] * 3
    np.testing.assert_allclose(-np.abs(marked_R), by_torch.logprobs_R, atol=1e-5)


@pytest.mark.parametrize("engine", ["torch", "verl"])
@pytest.mark.parametrize("name", parity.CASES)
def test_stale_untrained_and_dropped_calls_weigh_nothing(name: str, engine: str) -> None:
    """Whatever they said, the parameters move by the same to the last bit."""
    plain = update(name, engine)
    assert same(update(name, engine, others=LEFT_OUT), plain)
    assert not same(update(name, engine, others=(Kind.KEPT,)), plain), "what is trained on does weigh"


@pytest.mark.parametrize("name", parity.CASES)
def test_pad_rows_weigh_nothing(name: str) -> None:
    """The tokens of veRL's pad rows are replaced, and those of the rows before them."""
    plain = padded(name)
    assert plain.pads
    assert same(padded(name, others=plain.pads), plain)
    assert not same(padded(name, others=range(plain.pads[0])), plain)


def update(name: str, engine: str, **settings: Any) -> verl_bench.Made:
    """One update on what a run makes of the recorded episodes, from the same weights."""
    case = parity.CASES[name]
    batch = record(VOCABULARY, case.kind, **settings)
    if engine == "torch":
        return verl_bench.TorchBench(POLICY, case.name, case.options).update(batch)
    return verl_bench.VerlBench(POLICY, case.name, case.options).update(batch, VOCABULARY)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Sums in one order, so that equal is equal to the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def padded(name: str, **changes: Any) -> verl_bench.Made:
    """One update of veRL's workers, with three pad rows."""
    case = parity.CASES[name]
    batch = verl_bench.recorded_batch(VOCABULARY, case.kind)
    return verl_bench.VerlBench(POLICY, case.name, case.options).update(batch, VOCABULARY, 3, **changes)


def same(one: verl_bench.Made, other: verl_bench.Made) -> bool:
    """True if policy and critic moved by the same."""
    if one.critic_change is not None:
        assert other.critic_change is not None
        if not torch.equal(one.critic_change, other.critic_change):
            return False
    return torch.equal(one.change, other.change)
