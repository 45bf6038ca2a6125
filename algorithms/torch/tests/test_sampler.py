"""Records are what was sampled; who is answered when, what is computed again, and when a response ends."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from agl_chat.backends import Generation, Request, SampledToken
from agl_core.apis.errors import ApiError
from agl_core.errors import EngineError
from agl_core.types import FinishReason
from agl_torch.requests import Job, Row, choose, distort
from agl_torch.sampler import Sampler

from .conftest import Loaded, distributions, drive, random_ids, recomputed


def pick(logits: list[float], uniforms: list[float], temperature: float = 1.0, top_p: float = 1.0):
    count = len(uniforms)
    ids, logprobs, _ = choose(
        torch.tensor([logits] * count),
        torch.full((count,), temperature),
        torch.full((count,), top_p, dtype=torch.float64),
        torch.tensor(uniforms, dtype=torch.float64),
        torch.full((count,), -1),
    )
    return ids.tolist(), logprobs.tolist()


PROBS = [0.1, 0.6, 0.0, 0.3]
LOGITS = [float(np.log(p)) if p else -1e9 for p in PROBS]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_probabilities(temperature: float) -> None:
    powers = np.array(PROBS) ** (1 / temperature)
    expected = powers / powers.sum()
    ids, logprobs = pick(LOGITS, np.linspace(0, 1, 1000, endpoint=False).tolist(), temperature)
    assert [ids.count(i) for i in range(4)] == pytest.approx((1000 * expected).tolist(), abs=1)
    assert logprobs == pytest.approx([float(np.log(expected[i])) for i in ids], abs=1e-6)


@pytest.mark.parametrize(("top_p", "allowed"), [(0.5, {1}), (0.6, {1}), (0.85, {1, 3}), (0.95, {0, 1, 3})])
def test_top_p_draws_from_the_nucleus_and_records_the_full_distribution(top_p: float, allowed: set[int]) -> None:
    ids, logprobs = pick(LOGITS, np.linspace(0, 1, 500, endpoint=False).tolist(), top_p=top_p)
    assert set(ids) == allowed
    assert logprobs == pytest.approx([float(np.log(PROBS[i])) for i in ids], abs=1e-6)


@given(
    logits=st.lists(st.floats(-9, 9, width=16), min_size=8, max_size=8),
    prompt=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    response=st.lists(st.integers(0, 7), max_size=4),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "logit_bias": st.dictionaries(st.integers(0, 7).map(str), st.floats(-5, 5, width=16), min_size=1),
            "repetition_penalty": st.floats(0.5, 2),
            "min_p": st.floats(0.01, 1),
            "top_k": st.integers(1, 9),
        },
    ),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_a_distortion_is_that_of_the_processors_of_transformers(
    logits: list[float], prompt: list[int], response: list[int], fields: dict[str, Any], temperature: float
) -> None:
    """The presence and frequency penalties, which transformers has not, are compared with vLLM (`live_chat.py`)."""
    processors = LogitsProcessorList()
    if bias := fields.get("logit_bias"):
        processors.append(SequenceBiasLogitsProcessor({(int(token),): value for token, value in bias.items()}))
    if penalty := fields.get("repetition_penalty"):
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    processors.append(TemperatureLogitsWarper(temperature))
    if "min_p" in fields:
        processors.append(MinPLogitsWarper(fields["min_p"]))
    if "top_k" in fields:
        processors.append(TopKLogitsWarper(fields["top_k"]))
    expected = processors(torch.tensor([prompt + response]), torch.tensor([logits]))[0]
    request = Request("r", np.array(prompt, np.int32), 9, temperature=temperature, distortions=fields)
    row = Row(Job(request), 0, 9, [SampledToken(0, token, 0.0) for token in response])
    torch.testing.assert_close(distort(torch.tensor(logits), row) / temperature, expected)


def test_a_distortion_that_leaves_nothing_is_none() -> None:
    request = Request("r", np.array([0], np.int32), 9, distortions={"allowed_token_ids": [2]})
    logits = torch.tensor([1.0, 2.0, -np.inf])
    assert torch.equal(distort(logits, Row(Job(request), 0, 9)), logits)
    logits[2] = -5.0
    assert distort(logits, Row(Job(request), 0, 9)).tolist() == [-np.inf, -np.inf, -5]


@pytest.fixture(params=["qwen", "llama"])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    return request.getfixturevalue(request.param)


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
    reused = sampler.counters["tokens_reused"]
    second = drive(sampler, [continued(generated, i, loaded) for i, generated in enumerate(first.values())])
    assert_exact(loaded, second)
    assert reused > 0
    prefix = sum(len(first[name].request.prompt_ids) + len(first[name].responses[0].ids) - 1 for name in second)
    assert sampler.counters["tokens_reused"] - reused >= 0.9 * prefix


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


def test_distorted_responses_are_scored_by_the_models_own_distribution(qwen: Loaded) -> None:
    prompt = random_ids(qwen, 20, 0)
    asked = [
        Request("plain", prompt, max_tokens=12, seed=1),
        Request("penalty", prompt, max_tokens=12, temperature=0.0, distortions={"repetition_penalty": 1.7}),
        Request("likeliest", prompt, max_tokens=12, distortions={"top_k": 1}),
        Request("greedy", prompt, max_tokens=12, temperature=0.0),
        Request("few", prompt, max_tokens=12, distortions={"allowed_token_ids": [5, 7]}),
        Request("biased", prompt, max_tokens=12, distortions={"logit_bias": {"9": 100.0}}),
        Request("always new", prompt, max_tokens=12, temperature=0.0, distortions={"presence_penalty": 2.0}),
    ]
    done = drive(Sampler(qwen), asked)
    assert_exact(qwen, done)
    ids = {name: generated.responses[0].ids.tolist() for name, generated in done.items()}
    assert ids["penalty"] != ids["greedy"]
    assert ids["likeliest"] == ids["greedy"]
    assert set(ids["few"]) == {5, 7}
    assert set(ids["biased"]) == {9}
    alone = drive(Sampler(qwen), asked[:1])
    assert ids["plain"] == alone["plain"].responses[0].ids.tolist(), "its neighbours change nothing"
    with pytest.raises(ApiError, match="no token 100000"):
        Sampler(qwen).submit(Request("r", prompt, max_tokens=2, distortions={"logit_bias": {"100000": 1.0}}))


@pytest.mark.parametrize("change", ["bfloat16", "eager", "sdpa", "adapter"])
def test_other_weights_and_attention_are_sampled_as_exactly(qwen: Loaded, change: str) -> None:
    model = copy.deepcopy(qwen.model)
    if change == "bfloat16":
        model = model.to(torch.bfloat16)
    elif change == "adapter":
        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, adapter).eval()
    else:
        model.set_attn_implementation(change)
    other = replace(qwen, model=model)
    tolerance = 0.1 if change == "bfloat16" else 1e-4
    assert_exact(other, drive(Sampler(other), mixed_requests(other, 6)), tolerance)


def test_forced_tokens_are_masked_and_scored(qwen: Loaded) -> None:
    request = Request("r", random_ids(qwen, 12, 0), max_tokens=8, forced_ids=(9, 10, 11), temperature=0.7)
    generated = drive(Sampler(qwen.with_eos(9)), [request])["r"]
    response = generated.responses[0]
    assert response.ids[:3].tolist() == [9, 10, 11]
    assert [token.is_free for token in response.tokens] == [False] * 3 + [True] * (len(response.ids) - 3)
    assert len(response.ids) > 3, "a forced token ends nothing"
    np.testing.assert_allclose(response.logprobs, recomputed(qwen, generated), atol=1e-4)


def test_the_likeliest_tokens_are_those_of_the_distribution_that_is_drawn_from(qwen: Loaded) -> None:
    prompt = random_ids(qwen, 12, 0)
    requests = [
        Request("some", prompt, max_tokens=5, n=2, temperature=0.7, top=4),
        Request("none", prompt, max_tokens=9),
    ]
    done = drive(Sampler(qwen), requests)
    for choice, response in enumerate(done["some"].responses):
        expected = distributions(qwen, done["some"], choice).topk(4)
        assert [list(token.likeliest) for token in response.tokens] == expected.indices.tolist()
        likeliest = [list(token.likeliest.values()) for token in response.tokens]
        np.testing.assert_allclose(likeliest, expected.values, atol=1e-4)
    assert not any(token.likeliest for token in done["none"].responses[0].tokens)


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
        assert together.counters["tokens_reused"] == 0


def test_choices_share_their_prompt_and_differ(qwen: Loaded) -> None:
    prompt = random_ids(qwen, 60, 0)
    sampler = Sampler(qwen.with_eos())
    generated = drive(sampler, [Request("r", prompt, max_tokens=12, n=3, seed=-5)])["r"]
    assert len({response.ids.tobytes() for response in generated.responses}) == 3
    assert generated.prefilled == 60 + 1 + 1, "each further choice computes the last prompt token for its logits"
    assert generated.reused == 2 * 59
    again = drive(Sampler(qwen.with_eos()), [Request("r", prompt, max_tokens=12, n=1, seed=-5)])["r"]
    np.testing.assert_array_equal(again.responses[0].ids, generated.responses[0].ids)
    other = drive(Sampler(qwen.with_eos()), [Request("r", prompt, max_tokens=12, n=1, seed=6)])["r"]
    assert other.responses[0].ids.tolist() != generated.responses[0].ids.tolist()


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

    def take(done: Sequence[Generation]) -> None:
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
