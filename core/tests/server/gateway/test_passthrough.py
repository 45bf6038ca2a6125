"""What no policy answers is passed on, unrecorded and counted: embeddings, moderations, audio, images."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import pytest
from aiohttp import web

from agl_core.config.models import GatewaySection, PassthroughSection
from agl_core.server import Keys
from agl_core.testing.server import Stack, running_stack
from agl_core.testing.upstream import served
from agl_core.types import Ending
from agl_core.wire.workers import CloseRequest

SOUND = bytes(range(256)) * 4000


@dataclass
class OtherServer:
    """Serves embeddings, speech (streamed), transcriptions and one model; it keeps what it was sent."""

    received: list[web.Request] = field(default_factory=list)
    transcribed: list[tuple[str, bytes, str]] = field(default_factory=list)
    url: str = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[OtherServer]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/embeddings", self.embed)
        app.router.add_post("/v1/audio/speech", self.speak)
        app.router.add_post("/v1/audio/transcriptions", self.transcribe)
        app.router.add_get("/v1/files", self.embed)
        async with served(app) as url:
            self.url = f"{url}/v1"
            yield self

    async def embed(self, request: web.Request) -> web.Response:
        self.received.append(request)
        asked = await request.json()
        if asked["model"] == "unknown":
            error = {"message": "no such model", "type": "x", "param": "model", "code": "model_not_found"}
            return web.json_response({"error": error}, status=404)
        data = [{"object": "embedding", "index": 0, "embedding": [0.25, 0.5]}]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return web.json_response({"object": "list", "data": data, "model": asked["model"], "usage": usage})

    async def speak(self, request: web.Request) -> web.StreamResponse:
        self.received.append(request)
        response = web.StreamResponse(headers={"Content-Type": "audio/mpeg"})
        await response.prepare(request)
        for start in range(0, len(SOUND), 1 << 16):
            await response.write(SOUND[start : start + (1 << 16)])
        return response

    async def transcribe(self, request: web.Request) -> web.Response:
        self.received.append(request)
        form = await request.post()
        sound: Any = form["file"]
        self.transcribed.append((sound.filename, sound.file.read(), str(form["model"])))
        return web.json_response({"text": "hello"})


@pytest.fixture
async def other() -> AsyncIterator[OtherServer]:
    async with OtherServer().serving() as serving:
        yield serving


@pytest.fixture
async def stack(other: OtherServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    monkeypatch.setattr("agl_core.server.listening.MAX_AGENT_BODY", 2 << 20)
    gateway = GatewaySection(passthrough=PassthroughSection(url=other.url))
    async with running_stack(gateway=gateway, keys=Keys(passthrough="key-of-the-other")) as running:
        yield running


async def test_embeddings_are_passed_on_with_a_key_of_their_own_and_not_recorded(
    stack: Stack, other: OtherServer
) -> None:
    key = await stack.lease()
    reply = await stack.client(key).embeddings.create(model="embedder", input="hello", encoding_format="float")
    assert reply.data[0].embedding == [0.25, 0.5]
    (received,) = other.received
    assert received.headers["Authorization"] == "Bearer key-of-the-other"
    assert stack.key(key) not in str(received.headers)
    assert await stack.calls(key) == []
    assert stack.upstream.received == []
    await stack.client(key).chat.completions.create(model="default", messages=[{"role": "user", "content": "x"}])
    await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.FINISHED))
    assert (await stack.episode(key)).passed_through == {"embeddings": 1}


async def test_speech_is_streamed_and_transcriptions_are_uploaded(stack: Stack, other: OtherServer) -> None:
    key = await stack.lease()
    client = stack.client(key)
    speech = client.audio.speech.with_streaming_response.create(model="tts", voice="alloy", input="hello")
    async with speech as reply:
        assert reply.headers["content-type"] == "audio/mpeg"
        assert b"".join([part async for part in reply.iter_bytes()]) == SOUND
    text = await client.audio.transcriptions.create(model="stt", file=("said.mp3", SOUND))
    assert text.text == "hello"
    assert other.transcribed == [("said.mp3", SOUND, "stt")]


async def test_only_models_that_answer_calls_are_described(stack: Stack, other: OtherServer) -> None:
    client = stack.client(await stack.lease())
    assert (await client.models.retrieve("default")).owned_by == "agl"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("org/model:free")
    assert other.received == []


async def test_errors_of_the_other_server_are_passed_on(stack: Stack) -> None:
    client = stack.client(await stack.lease())
    with pytest.raises(openai.NotFoundError, match="no such model") as raised:
        await client.embeddings.create(model="unknown", input="x")
    assert raised.value.code == "model_not_found"


async def test_a_route_that_no_server_has_names_the_setting(stack: Stack) -> None:
    """The other server has no moderations; a model server without embeddings is asked where no other is set."""
    with pytest.raises(openai.NotFoundError, match=r"POST /v1/moderations.*\[gateway\.passthrough\] url"):
        await stack.client(await stack.lease()).moderations.create(input="x")
    async with running_stack() as plain:
        key = await plain.lease()
        with pytest.raises(openai.NotFoundError, match=r"POST /v1/embeddings.*\[gateway\.passthrough\] url"):
            await plain.client(key).embeddings.create(model="m", input="x")


async def test_without_another_server_the_model_server_is_asked_with_its_own_key(other: OtherServer) -> None:
    async with running_stack(upstream_fields=lambda _: {"urls": (other.url,)}) as stack:
        key = await stack.lease()
        await stack.client(key).embeddings.create(model="embedder", input="x", encoding_format="float")
    assert other.received[0].headers["Authorization"] == "Bearer upstream-key"


async def test_an_agent_without_a_key_or_after_its_end_gets_nothing(stack: Stack, other: OtherServer) -> None:
    key = await stack.lease()
    with pytest.raises(openai.AuthenticationError):
        await stack.client(key, api_key="nonsense").embeddings.create(model="m", input="x")
    await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.FINISHED))
    with pytest.raises(openai.APIStatusError) as raised:
        await stack.client(key).embeddings.create(model="m", input="x")
    assert raised.value.status_code == 410
    assert other.received == []


async def test_no_other_route_is_reached(stack: Stack, other: OtherServer) -> None:
    key = await stack.lease()
    headers = {"Authorization": f"Bearer {stack.key(key)}"}
    async with httpx2.AsyncClient(trust_env=False) as client:
        for route in ("files", "models/..%2Ffiles", "models/%252e%252e/files", "embeddings/../files"):
            assert (await client.get(f"{stack.url(key)}/{route}", headers=headers)).status_code in (404, 405), route
        assert (await client.delete(f"{stack.url(key)}/models/m", headers=headers)).status_code in (404, 405)
    assert other.received == []


async def test_a_server_that_is_away(other: OtherServer) -> None:
    section = GatewaySection(passthrough=PassthroughSection(url="http://127.0.0.1:9/v1"))
    async with running_stack(gateway=section) as stack:
        with pytest.raises(openai.InternalServerError, match=r"http://127\.0\.0\.1:9/v1 cannot be asked"):
            await stack.client(await stack.lease()).embeddings.create(model="m", input="x")
