"""The one thread that owns the tensors, and the HTTP API before it, asked by the official client over a real socket."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import uvicorn

from agl_chat.api import ModelServer, create_app
from agl_chat.backends import Request
from agl_chat.conversation import ChatText
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


USER = {"role": "user", "content": "What is 12 plus 30?"}


@asynccontextmanager
async def serving(loaded: Loaded) -> AsyncIterator[tuple[str, Sampler]]:
    sampler = Sampler(loaded)
    loop = EngineLoop({"policy": sampler}, pytest.fail)
    loop.start()
    app = create_app(
        {"policy": ModelServer("policy", ChatText(loaded.tokenizer, loaded.eos_ids), loaded.context_length)},
        loop,
        api_key="secret",
    )
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", sampler
        server.should_exit = True
        await running


@pytest.fixture
async def url(qwen: Loaded) -> AsyncIterator[str]:
    async with serving(qwen) as (address, _):
        yield address


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as openai_client:
        yield openai_client


async def test_errors_have_the_shape_that_clients_expect(client: openai.AsyncOpenAI, url: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="less than or equal to 128"):
            await client.chat.completions.create(model="policy", messages=[USER], stream=stream, n=999)
    with pytest.raises(openai.NotFoundError, match="Did you mean 'policy'"):
        await client.chat.completions.create(model="polcy", messages=[USER])
    with pytest.raises(openai.BadRequestError) as long:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "5" * 999}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError, match="Wrong API key"):
        await client.with_options(api_key="guess").chat.completions.create(model="policy", messages=[USER])
    async with httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer secret"}) as plain:
        for body in (b"{", b"[]", b'{"model": "policy"}'):
            reply = await plain.post("/v1/chat/completions", content=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["type"] == "invalid_request_error"
        reply = await plain.post("/v1/chat/completions", json={"model": "policy", "messages": [USER], "max_tokens": 2})
        assert reply.headers["x-agl-policy-version"] == "0"
        assert "agl" not in reply.json()


async def test_a_streamed_reply_is_the_one_that_comes_whole(client: openai.AsyncOpenAI) -> None:
    body: Any = {"model": "policy", "messages": [USER], "max_tokens": 20, "seed": 5, "n": 2, "logprobs": True}
    body["extra_body"] = {"return_token_ids": True}
    whole = await client.chat.completions.create(**body)
    chunks = [chunk async for chunk in await client.chat.completions.create(**body, stream=True)]
    for choice in whole.choices:
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
        assert pieces[-1].finish_reason == choice.finish_reason
        given: Any = choice
        entries = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content or ()]
        assert [entry.logprob for entry in entries] == pytest.approx([e.logprob for e in given.logprobs.content])
        tokens = [(piece.model_extra or {}).get("token_ids", []) for piece in pieces]
        assert [token for some in tokens for token in some] == given.token_ids
        assert sum(map(bool, tokens)) > 3, "they came one after the other"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].model_extra["agl"]["version"] == 0


async def test_what_tunes_a_hosted_service_is_ignored_and_noted(client: openai.AsyncOpenAI) -> None:
    """A field that is not known here does not fail an agent, and the reply names it."""
    body: Any = {"model": "policy", "messages": [USER], "max_tokens": 2}
    tuned: Any = {"verbosity": "low", "prompt_cache_retention": "24h", "store": True, "reasoning_effort": "none"}
    unknown = {"temprature": 0, "größe\n": {"a": 1}, "add_generation_prompt": False, "nothing": None}
    reply = await client.chat.completions.with_raw_response.create(**body, **tuned, extra_body=unknown)
    noted = reply.headers["x-agl-ignored"]
    assert set(noted.split(", ")) == {*tuned, "temprature", "gr%C3%B6%C3%9Fe%0A", "add_generation_prompt"}
    neutral = {"modalities": ["text"], "response_format": {"type": "text"}, "top_k": -1, "best_of": 1, "user": None}
    reply = await client.chat.completions.with_raw_response.create(**body, extra_body=neutral)
    assert "x-agl-ignored" not in reply.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_frees_its_place(qwen: Loaded, stream: bool) -> None:
    def chat(max_tokens: int, n: int) -> dict[str, object]:
        # Sequences longer than the slots that a sampler begins with.
        messages = [{"role": "user", "content": "5" * 260}]
        return {"model": "policy", "messages": messages, "max_tokens": max_tokens, "n": n, "stream": stream}

    async with serving(qwen.with_eos()) as (url, sampler):

        async def begun(after: int) -> None:
            while sampler.counters["tokens_reused"] <= after:  # noqa: ASYNC110  counters change on another thread
                await asyncio.sleep(0)

        headers = {"authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=f"{url}/v1", headers=headers, timeout=60) as plain:
            asking = asyncio.create_task(plain.post("/chat/completions", json=chat(200, n=8)))
            await begun(after=0)
            beside = asyncio.create_task(plain.post("/chat/completions", json=chat(100, n=1)))
            await begun(after=sampler.counters["tokens_reused"])
            asking.cancel()
            for reply in (await beside, await plain.post("/chat/completions", json=chat(1, n=1))):
                assert reply.status_code == 200
        while not sampler.idle:  # noqa: ASYNC110  its own thread empties it
            await asyncio.sleep(0)
        assert sampler.counters["tokens_decoded"] < 8 * 200
