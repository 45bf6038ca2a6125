"""What is recorded is what was sampled: log-probabilities, greedy choice, whatever the cache did."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from agl_torch.requests import Request
from agl_torch.sampler import Sampler

from .conftest import Loaded, drive, random_ids, recomputed


@pytest.fixture(params=["qwen", "llama"])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    chosen: Loaded = request.getfixturevalue(request.param)
    return chosen


def mixed_requests(loaded: Loaded, count: int = 14) -> list[Request]:
    """Ragged prompts, some of which share prefixes, with different temperatures, limits and nuclei."""
    system = random_ids(loaded, 40, 99)
    requests = []
    for i in range(count):
        own = random_ids(loaded, 3 + 17 * (i % 5), i // 2)
        prompt = own if i % 3 == 0 else np.concatenate([system, own])
        requests.append(
            Request(
                f"r{i}",
                prompt,
                max_tokens=4 + 5 * (i % 4),
                n=1 + (i % 7 == 0),
                temperature=(1.0, 0.6, 1.7, 0.0)[i % 4],
                top_p=0.8 if i % 5 == 4 else 1.0,
                seed=i,
                forced_ids=(9, 10, 11) if i == 5 else (),
            )
        )
    return requests


def continued(generated, i: int, loaded: Loaded) -> Request:
    """The next turn: prompt, response and some more."""
    prompt = np.concatenate([generated.request.prompt_ids, generated.responses[0].ids, random_ids(loaded, 5 + i, i)])
    return replace(generated.request, prompt_ids=prompt, n=1, forced_ids=())


def assert_exact(loaded: Loaded, done, tolerance: float = 1e-4) -> None:
    for generated in done.values():
        for choice, response in enumerate(generated.responses):
            np.testing.assert_allclose(response.logprobs, recomputed(loaded, generated, choice), atol=tolerance)


def test_logprobs_are_those_of_one_plain_forward_pass(loaded: Loaded) -> None:
    sampler = Sampler(loaded, max_rows=6)
    first = drive(sampler, mixed_requests(loaded))
    assert_exact(loaded, first)
    reused = sampler.counters.reused
    second = drive(sampler, [continued(generated, i, loaded) for i, generated in enumerate(first.values())])
    assert_exact(loaded, second)
    assert reused > 0
    prefix = sum(len(first[name].request.prompt_ids) + len(first[name].responses[0].ids) - 1 for name in second)
    assert sampler.counters.reused - reused >= 0.9 * prefix


def test_logprobs_stay_exact_in_a_cache_too_small_for_all(qwen: Loaded) -> None:
    qwen, cache_bytes = qwen.with_eos(), 5 * 256 * qwen.token_bytes
    roomy, tight = Sampler(qwen), Sampler(qwen, cache_bytes=cache_bytes)
    requests = [Request(f"r{i}", random_ids(qwen, 180 + 10 * i, i), max_tokens=40, seed=i) for i in range(6)]
    done = drive(tight, requests)
    assert tight.counters.preempted > 0
    assert tight.cache_nbytes <= cache_bytes
    assert_exact(qwen, done)
    roomy_done = drive(roomy, requests)
    assert_exact(qwen, roomy_done)
    for name, generated in done.items():
        np.testing.assert_array_equal(generated.responses[0].ids, roomy_done[name].responses[0].ids)


def test_a_long_prompt_is_prefilled_in_pieces(qwen: Loaded) -> None:
    sampler = Sampler(qwen, prefill_tokens=32)
    requests = [Request(f"r{i}", random_ids(qwen, 31 + 40 * i, i), max_tokens=6) for i in range(5)]
    assert_exact(qwen, drive(sampler, requests))
    assert sampler.counters.prefilled == sum(len(request.prompt_ids) for request in requests)


def test_greedy_is_what_generate_does(loaded: Loaded) -> None:
    requests = [replace(request, temperature=0.0, n=1, forced_ids=()) for request in mixed_requests(loaded)]
    done = drive(Sampler(loaded, max_rows=5), requests)
    for request in requests:
        prompt = torch.tensor(request.prompt_ids, dtype=torch.long)[None]
        expected = loaded.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.max_tokens,
            do_sample=False,
            eos_token_id=sorted(loaded.eos_ids),
            pad_token_id=0,
        )[0, prompt.shape[1] :]
        assert done[request.id].responses[0].ids.tolist() == expected.tolist()


def in_bfloat16(model: Any) -> Any:
    return model.to(torch.bfloat16)


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


def sdpa(model: Any) -> Any:
    model.set_attn_implementation("sdpa")
    return model


def adapted(model: Any) -> Any:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, adapter).eval()


@pytest.mark.parametrize(("change", "tolerance"), [(in_bfloat16, 0.1), (eager, 1e-4), (sdpa, 1e-4), (adapted, 1e-4)])
def test_other_weights_and_attention_are_sampled_as_exactly(
    qwen: Loaded, change: Callable[[Any], Any], tolerance: float
) -> None:
    other = replace(qwen, model=change(copy.deepcopy(qwen.model)))
    assert_exact(other, drive(Sampler(other), mixed_requests(other, 6)), tolerance)


def test_forced_tokens_are_masked_and_scored(qwen: Loaded) -> None:
    request = Request("r", random_ids(qwen, 12, 0), max_tokens=8, forced_ids=(9, 10, 11), temperature=0.7)
    generated = drive(Sampler(qwen.with_eos(9)), [request])["r"]
    response = generated.responses[0]
    assert response.ids[:3].tolist() == [9, 10, 11]
    assert response.mask is not None
    assert response.mask.tolist() == [False] * 3 + [True] * (len(response.ids) - 3)
    assert len(response.ids) > 3, "a forced token ends nothing"
    np.testing.assert_allclose(response.logprobs, recomputed(qwen, generated), atol=1e-4)


def test_deterministic_sampling_does_not_depend_on_what_else_is_in_flight(qwen: Loaded) -> None:
    long = Request("long", random_ids(qwen, 245, 0), max_tokens=20)
    requests = [*mixed_requests(qwen, 7), long]
    alone = {}
    for request in requests:
        alone.update(drive(Sampler(qwen, deterministic=True), [request]))
    cache_bytes = 4 * 512 * qwen.token_bytes
    for concurrency in (1, 3, 64):
        together = Sampler(qwen, deterministic=True, max_rows=concurrency, cache_bytes=cache_bytes)
        done = drive(together, requests[::-1])
        for name, generated in alone.items():
            for one, other in zip(generated.responses, done[name].responses, strict=True):
                assert one.ids.tobytes() == other.ids.tobytes()
                assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert together.counters.reused == 0


def test_batching_does_not_change_what_is_drawn(qwen: Loaded) -> None:
    requests = mixed_requests(qwen)
    together = drive(Sampler(qwen), requests)
    for request in requests[:6]:
        alone = drive(Sampler(qwen), [request])[request.id]
        for one, other in zip(alone.responses, together[request.id].responses, strict=True):
            np.testing.assert_array_equal(one.ids, other.ids)
