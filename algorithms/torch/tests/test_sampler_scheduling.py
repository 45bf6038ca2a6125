"""Who is answered when, what is computed again, and when a response ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from agl_core.errors import EngineError
from agl_core.types import FinishReason
from agl_torch.requests import Generated, Request
from agl_torch.sampler import Sampler

from .conftest import Loaded, drive, random_ids, recomputed

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}


class Deaf(LlamaForCausalLM):
    """Takes no mask from outside: a padded row sees its pads."""

    def forward(self, *args, attention_mask=None, **kwargs):
        return super().forward(*args, **kwargs)


def test_choices_share_their_prompt_and_differ(qwen: Loaded) -> None:
    prompt = random_ids(qwen, 60, 0)
    sampler = Sampler(qwen.with_eos())
    generated = drive(sampler, [Request("r", prompt, max_tokens=12, n=3, seed=5)])["r"]
    assert len({response.ids.tobytes() for response in generated.responses}) == 3
    assert generated.prefilled == 60 + 1 + 1, "each further choice computes the last prompt token for its logits"
    assert generated.reused == 2 * 59
    again = drive(Sampler(qwen.with_eos()), [Request("r", prompt, max_tokens=12, n=1, seed=5)])["r"]
    np.testing.assert_array_equal(again.responses[0].ids, generated.responses[0].ids)
    other = drive(Sampler(qwen.with_eos()), [Request("r", prompt, max_tokens=12, n=1, seed=6)])["r"]
    assert other.responses[0].ids.tolist() != generated.responses[0].ids.tolist()


def test_a_group_computes_its_shared_prompt_once(qwen: Loaded) -> None:
    system = random_ids(qwen, 80, 0)
    prompts = [np.concatenate([system, random_ids(qwen, 40, task)]) for task in (1, 2, 3)]
    sampler = Sampler(qwen.with_eos())
    drive(sampler, [Request(f"{t}.{m}", prompts[t], max_tokens=4, seed=m) for t in range(3) for m in range(8)])
    assert sampler.counters.prefilled == 80 + 3 * 40 + 3 * 7
    assert sampler.counters.reused == 24 * 120 - sampler.counters.prefilled


def test_the_next_turn_computes_only_what_is_new(qwen: Loaded) -> None:
    sampler = Sampler(qwen.with_eos())
    first = drive(sampler, [Request("a", random_ids(qwen, 50, 0), max_tokens=10)])["a"]
    turn = np.concatenate([first.request.prompt_ids, first.responses[0].ids, random_ids(qwen, 7, 1)])
    second = drive(sampler, [Request("b", turn, max_tokens=10)])["b"]
    assert (second.reused, second.prefilled) == (59, 8), "the last sampled token was never fed"


def test_all_choices_of_a_request_are_of_one_version(qwen: Loaded) -> None:
    sampler = Sampler(qwen.with_eos(), max_rows=1)
    sampler.submit(Request("a", random_ids(qwen, 10, 0), max_tokens=2, n=2))
    sampler.step()
    with pytest.raises(EngineError, match="drain"):
        sampler.new_version(1)
    assert len(drive(sampler)["a"].responses) == 2


MOVES = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 300), st.integers(1, 80), st.integers(1, 3)),
    st.tuples(st.just("step"), st.integers(1, 30)),
    st.tuples(st.just("abort"), st.integers(0, 7)),
    st.sampled_from([("reset",), ("new_version",), ("submit too much",)]),
)
GROWN = ("submit", 250, 40, 2), ("submit", 9, 60, 1), ("step", 10)
"""Sequences longer than the slots that a sampler begins with, which have 256 tokens."""


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(MOVES, max_size=20), st.booleans())
@example([*GROWN, ("abort", 0), ("step", 5)], False)
@example([*GROWN, ("reset",), *GROWN, ("abort", 2), ("new_version",), *GROWN], False)
def test_whatever_leaves_and_whenever_what_stays_is_answered_exactly(
    qwen: Loaded, moves: Sequence[tuple], deterministic: bool
) -> None:
    cache_bytes = 6 * 256 * qwen.token_bytes
    sampler = Sampler(
        qwen.with_eos(), cache_bytes=cache_bytes, max_rows=5, prefill_tokens=128, deterministic=deterministic
    )
    count = version = 0
    expected: dict[str, int] = {}
    """Requests that are to be answered, and by which version."""

    def take(done: Sequence[Generated]) -> None:
        for generated in done:
            assert generated.version == expected.pop(generated.request.id)
            for choice, response in enumerate(generated.responses):
                again = recomputed(qwen, generated, choice)
                np.testing.assert_allclose(response.logprobs, again, atol=1e-4)

    for move, *values in moves:
        if move == "submit":
            length, max_tokens, n = values
            # Every other prompt begins as another does.
            prompt = random_ids(qwen, length, count % 2 and count)
            sampler.submit(Request(str(count), prompt, max_tokens=max_tokens, n=n, seed=count))
            expected[str(count)] = version
            count += 1
        elif move == "submit too much":
            with pytest.raises(EngineError, match="512 tokens"):
                sampler.submit(Request("long", random_ids(qwen, 512, 0), max_tokens=1))
        elif move == "step":
            for _ in range(values[0]):
                take(sampler.step())
        elif move == "abort":
            sampler.abort(str(values[0]))
            expected.pop(str(values[0]), None)
        elif move == "reset":
            sampler.reset()
            expected.clear()
        else:
            while not sampler.idle:
                take(sampler.step())
            sampler.release()
            version += 1
            sampler.new_version(version)
        assert sampler.cache_nbytes <= cache_bytes
    while not sampler.idle:
        take(sampler.step())
    assert not expected


def test_a_response_ends_at_any_end_token_and_keeps_it(qwen: Loaded) -> None:
    request = Request("r", random_ids(qwen, 20, 0), max_tokens=30, seed=3)
    endless = drive(Sampler(qwen.with_eos()), [request])["r"].responses[0]
    assert endless.finish_reason is FinishReason.LENGTH
    assert len(endless.ids) == 30
    ends = (int(endless.ids[11]), int(endless.ids[17]))
    at = min(endless.ids.tolist().index(end) for end in ends)
    ended = drive(Sampler(qwen.with_eos(*ends)), [request])["r"].responses[0]
    assert ended.finish_reason is FinishReason.STOP
    np.testing.assert_array_equal(ended.ids, endless.ids[: at + 1])


def test_a_response_ends_with_the_context(qwen: Loaded) -> None:
    small = replace(qwen.with_eos(), context_length=40)
    response = drive(Sampler(small), [Request("r", random_ids(qwen, 30, 0), max_tokens=99)])["r"].responses[0]
    assert (len(response.ids), response.finish_reason) == (10, FinishReason.LENGTH)
    with pytest.raises(EngineError, match="40 tokens"):
        Sampler(small).submit(Request("r", random_ids(qwen, 40, 0), max_tokens=1))


def test_a_cache_takes_the_memory_of_what_is_in_it(qwen: Loaded) -> None:
    resident = psutil.Process().memory_info
    before = resident().rss
    sampler = Sampler(qwen.with_eos(), cache_bytes=1 << 30, max_rows=4096)
    assert sampler.cache_nbytes > 1 << 29
    drive(sampler, [Request("a", random_ids(qwen, 20, 0), max_tokens=20)])
    assert resident().rss - before < 1 << 26


def test_a_cache_that_cannot_hold_one_context_is_refused(qwen: Loaded) -> None:
    with pytest.raises(EngineError, match=r"0.0 MiB of keys and values are too few"):
        Sampler(qwen, cache_bytes=1000)


def test_a_model_with_a_short_window_is_refused(qwen: Loaded) -> None:
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, sliding_window=16,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    with pytest.raises(EngineError, match=r"sliding window of 16.*engine\.torch\.max_context to at most 16"):
        Sampler(replace(qwen, model=model, context_length=64))
    Sampler(replace(qwen, model=model, context_length=16))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (FalconForCausalLM(FalconConfig(**SMALL, alibi=True)), "does not run with the sampler's cache and mask"),
        (BloomForCausalLM(BloomConfig(**SMALL)), "does not run with the sampler's cache and mask"),
        (FalconH1ForCausalLM(FalconH1Config(**SMALL, **MAMBA)), "only full attention"),
        (JambaForCausalLM(JambaConfig(**SMALL, num_experts=2, use_mamba_kernels=False)), "only full attention"),
        (Deaf(LlamaConfig(**SMALL)), "from that of the model's own forward pass"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_model_that_cannot_be_sampled_exactly_is_refused_at_the_start(qwen: Loaded, model, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        Sampler(replace(qwen, model=model.eval(), context_length=64))
