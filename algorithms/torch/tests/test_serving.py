"""The one thread that owns the tensors: what is sampled together, and what waits for what."""

from __future__ import annotations

import asyncio
import queue
import threading
from dataclasses import replace

import numpy as np
import pytest

from agl_chat.backends import Request, SampledToken
from agl_core.errors import EngineError
from agl_torch.process import EngineLoop
from agl_torch.sampler import Sampler

from .conftest import Loaded, random_ids


class Watched(Sampler):
    """Tells when it has begun to sample, and fails on demand."""

    began: threading.Event
    fails = False

    def step(self):
        if self.fails:
            raise RuntimeError("out of memory")
        finished = super().step()
        self.began.set()
        return finished


@pytest.fixture
def sampler(qwen: Loaded) -> Watched:
    watched = Watched(qwen.with_eos())
    watched.began = threading.Event()
    return watched


@pytest.fixture
def samplers(sampler: Watched) -> dict[str, Sampler]:
    return {"m": sampler}


@pytest.fixture
async def loop(samplers: dict[str, Sampler]) -> EngineLoop:
    running = EngineLoop(samplers, pytest.fail)
    running.start()
    return running


def request(loaded: Loaded, name: str, max_tokens: int = 8) -> Request:
    return Request(name, random_ids(loaded, 12, len(name)), max_tokens=max_tokens, model="m")


async def test_a_job_waits_for_what_is_in_flight_and_holds_what_comes(
    qwen: Loaded, sampler: Watched, loop: EngineLoop
) -> None:
    order: list[str] = []

    async def ask(name: str) -> int:
        generated = await loop.generate(request(qwen, name, max_tokens=40))
        order.append(name)
        return generated.version

    def update() -> str:
        assert sampler.idle
        sampler.new_version(1)
        return threading.current_thread().name

    before = asyncio.create_task(ask("before"))
    await asyncio.to_thread(sampler.began.wait)
    job = asyncio.wrap_future(loop.run_exclusive(update))
    job.add_done_callback(lambda _: order.append("job"))
    await asyncio.sleep(0)
    after = asyncio.create_task(ask("after"))
    assert [await before, await job, await after] == [0, "agl-torch", 1]
    assert order == ["before", "job", "after"]


async def test_a_failing_step_fails_its_requests_and_sampling_goes_on(
    qwen: Loaded, sampler: Watched, loop: EngineLoop
) -> None:
    sampler.fails = True
    with pytest.raises(EngineError, match="RuntimeError: out of memory"):
        await loop.generate(request(qwen, "a"))
    sampler.fails = False
    assert (await loop.generate(request(qwen, "a"))).responses


async def test_an_error_that_ends_the_thread_is_told(
    qwen: Loaded, sampler: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request_id: str) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(sampler, "abort", fail)
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    loop = EngineLoop({"m": sampler}, reasons.put)
    loop.start()
    asking = asyncio.create_task(loop.generate(request(qwen, "a", max_tokens=400)))
    await asyncio.to_thread(sampler.began.wait)
    asking.cancel()
    assert "RuntimeError: no such luck" in await asyncio.to_thread(reasons.get, timeout=60)


async def test_a_model_that_is_removed_answers_what_it_was_asked(
    qwen: Loaded, loop: EngineLoop, sampler: Watched, samplers: dict[str, Sampler]
) -> None:
    asking = [asyncio.create_task(loop.generate(request(qwen, name, max_tokens=100))) for name in ("a", "bb")]
    await asyncio.to_thread(sampler.began.wait)
    del samplers["m"]
    assert [len(generated.responses) for generated in await asyncio.gather(*asking)] == [1, 1]


async def test_a_request_that_cannot_be_taken_fails_alone(qwen: Loaded, loop: EngineLoop) -> None:
    good = asyncio.create_task(loop.generate(request(qwen, "good")))
    with pytest.raises(EngineError, match="0 tokens"):
        await loop.generate(replace(request(qwen, "bad"), prompt_ids=np.array([], np.int32)))
    assert (await good).responses


async def test_tokens_are_told_as_they_come(qwen: Loaded, sampler: Watched, loop: EngineLoop) -> None:
    told: list[tuple[int, SampledToken]] = []

    def watch(token: SampledToken) -> None:
        told.append((sampler.counters["tokens_decoded"], token))

    generated = await loop.generate(replace(request(qwen, "a", max_tokens=20), n=2, watch=watch))
    for choice, response in enumerate(generated.responses):
        assert [token for _, token in told if token.choice == choice] == response.tokens
    assert len({decoded for decoded, _ in told}) > 9


async def test_a_request_that_is_cancelled_frees_its_place(qwen: Loaded, sampler: Watched, loop: EngineLoop) -> None:
    asking = asyncio.create_task(loop.generate(replace(request(qwen, "a", max_tokens=200), n=8)))
    await asyncio.to_thread(sampler.began.wait)
    beside = asyncio.create_task(loop.generate(request(qwen, "bb", max_tokens=20)))
    await asyncio.sleep(0)
    asking.cancel()
    assert (await beside).responses
    assert await asyncio.wrap_future(loop.run_exclusive(lambda: sampler.idle))
    assert sampler.counters["tokens_decoded"] < 8 * 200
