"""The one thread: what waits for what, and what becomes of errors."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from agl_core.errors import EngineError
from agl_torch.loop import EngineLoop
from agl_torch.requests import Request
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
async def loop(sampler: Watched) -> EngineLoop:
    running = EngineLoop({"m": sampler}, pytest.fail)
    running.start()
    return running


def request(loaded: Loaded, name: str, max_tokens: int = 8) -> Request:
    return Request(name, random_ids(loaded, 12, len(name)), max_tokens=max_tokens)


async def test_a_job_waits_for_what_is_in_flight_and_holds_what_comes(
    qwen: Loaded, sampler: Watched, loop: EngineLoop
) -> None:
    order: list[str] = []

    async def ask(name: str) -> int:
        generated = await loop.generate("m", request(qwen, name, max_tokens=40))
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
        await loop.generate("m", request(qwen, "a"))
    sampler.fails = False
    assert (await loop.generate("m", request(qwen, "a"))).responses


async def test_an_error_that_ends_the_thread_is_told_and_fails_what_is_unanswered(
    qwen: Loaded, sampler: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request_id: str) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(sampler, "abort", fail)
    reasons: list[str] = []
    loop = EngineLoop({"m": sampler}, reasons.append)
    loop.start()
    asked = [asyncio.create_task(loop.generate("m", request(qwen, name, max_tokens=400))) for name in ("a", "b")]
    await asyncio.to_thread(sampler.began.wait)
    asked[0].cancel()
    with pytest.raises(EngineError, match="stopped"):
        await asked[1]
    with pytest.raises(EngineError, match="stopped"):
        await loop.generate("m", request(qwen, "c"))
    assert "RuntimeError: no such luck" in reasons[0]


async def test_a_request_that_cannot_be_taken_fails_alone(qwen: Loaded, loop: EngineLoop) -> None:
    good = asyncio.create_task(loop.generate("m", request(qwen, "good")))
    with pytest.raises(EngineError, match="0 tokens"):
        await loop.generate("m", replace(request(qwen, "bad"), prompt_ids=np.array([], np.int32)))
    assert (await good).responses
