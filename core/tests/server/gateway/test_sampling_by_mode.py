"""The rollout's mode decides how replies are sampled, whatever the agent asks for."""

from __future__ import annotations

from typing import Any

import pytest

from agl_core.testing.server import Stack, running_stack
from agl_core.types import Mode, Sampling

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("mode", "temperature"), [(Mode.TRAIN, 0.7), (Mode.EVAL_SAMPLED, 0.7), (Mode.EVAL_GREEDY, 0.0)]
)
async def test_the_mode_fixes_the_sampling(stack: Stack, mode: Mode, temperature: float) -> None:
    key = await stack.lease(mode=mode)
    await stack.client(key).chat.completions.create(
        model="default", messages=HELLO, temperature=1.9, top_p=0.1, seed=5, max_completion_tokens=7
    )
    await stack.client(key).chat.completions.create(model="default", messages=HELLO, max_tokens=99_999)
    narrow, wide = (received.body for received in stack.upstream.received)
    assert (narrow["temperature"], narrow["top_p"], narrow["max_tokens"]) == (temperature, 1.0, 7)
    assert wide["max_tokens"] == 512
    assert "max_completion_tokens" not in narrow
    first, second = await stack.calls(key)
    assert first.requested == Sampling(temperature=1.9, top_p=0.1, max_tokens=7, seed=5)
    assert first.effective == Sampling(temperature=temperature, top_p=1.0, max_tokens=7, seed=narrow["seed"])
    assert second.requested == Sampling(max_tokens=99_999)


async def test_what_distorts_log_probabilities_is_dropped_in_training(stack: Stack) -> None:
    key = await stack.lease()
    await stack.client(key).chat.completions.create(
        model="default",
        messages=HELLO,
        presence_penalty=1,
        frequency_penalty=1,
        logit_bias={"5": 3},
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2},
    )
    distorting = {"presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p", "repetition_penalty"}
    assert not distorting & set(stack.upstream.received[0].body)
    (call,) = await stack.calls(key)
    assert distorting <= set(call.request)


async def test_seeds_differ_between_calls_and_repeat_exactly() -> None:
    async def seeds(run_seed: int) -> list[int]:
        async with running_stack(seed=run_seed) as stack:
            for fields in ({"member": 0}, {"member": 1}, {"step": 1}, {"position": 1}, {"mode": Mode.EVAL_SAMPLED}):
                key = await stack.lease(**fields)
                for _ in range(2):
                    await stack.client(key).chat.completions.create(model="default", messages=HELLO, seed=5)
            return [received.body["seed"] for received in stack.upstream.received]

    first = await seeds(1)
    assert len(set(first)) == 10
    assert all(0 <= seed < 2**63 for seed in first)
    assert await seeds(1) == first
    assert not set(await seeds(2)) & set(first)
