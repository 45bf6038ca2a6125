"""The gateway: routes, refusals, requests that it passes on, and upstreams that fail."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from aiohttp import web
from memory_store import MemoryStore
from openai import AsyncOpenAI

from agl_core.apis.errors import ENGINE_FAILED
from agl_core.capture.requests import HEADER_ROLLOUT
from agl_core.config.sections import GatewaySection, PassthroughSection
from agl_core.testing.scripts import Drop, Fail, Hold, Raw, Step
from agl_core.testing.upstream import served
from agl_core.types import AttemptKey, Ending
from agl_core.wire import CloseRequest
from agl_server.http.keys import Keys
from agl_server.testing import Stack, running_stack

from .server_aids import GOOD, HELLO, OVERFLOW, SMALLEST, closed, log_of_agl, open_attempt, post


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_bodies_that_are_no_json_object(stack: Stack, key: AttemptKey) -> None:
    for body in (b"", b"{", b"[]", b"3", b'{"temperature": NaN}', b"\xff"):
        response = await post(stack, key, body)
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_json"), body


async def test_a_call_must_belong_to_a_rollout(stack: Stack, key: AttemptKey) -> None:
    with pytest.raises(openai.AuthenticationError, match=r"context\.base_url and context\.api_key"):
        await stack.client().chat.completions.create(**GOOD)
    with pytest.raises(openai.AuthenticationError, match="OPENAI_API_KEY") as raised:
        await stack.client(key, api_key="nonsense").chat.completions.create(**GOOD)
    assert raised.value.code == "invalid_api_key"
    for unknown in (AttemptKey("nobody", 0), AttemptKey(key.rollout, 5)):
        with pytest.raises(openai.NotFoundError, match=unknown.rollout):
            await stack.client(unknown).chat.completions.create(**GOOD)
    for header in ("", "nobody", "nobody/x", f"{key.rollout}/-1", f"{key.rollout}/9"):
        with pytest.raises(openai.AuthenticationError):
            await stack.client(
                api_key=stack.key(key), default_headers={HEADER_ROLLOUT: header}
            ).chat.completions.create(**GOOD)
    with pytest.raises(openai.BadRequestError, match="header x-agl-rollout"):
        await stack.client(key, default_headers={HEADER_ROLLOUT: "other/0"}).chat.completions.create(**GOOD)
    assert stack.upstream.received == []


async def test_unknown_routes_say_what_there_is(stack: Stack, key: AttemptKey, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        await client.files.list()
    with pytest.raises(openai.NotFoundError, match=r"POST /v1/chat/completions, /v1/responses"):
        await client.responses.compact(model="default", input="x")
    response = await post(stack, key, route="models")
    assert response.status_code == 405
    assert "does not serve POST" in error_of(response)["message"]
    response = await post(stack, key, route="traces")
    assert (response.status_code, "install it" in error_of(response)["message"]) == (404, True)


FAILURES: list[tuple[Any, int, str]] = [
    (Fail(500), 502, "answered 500: scripted failure"),
    (Fail(503, "<html>"), 502, "answered 503"),
    (Fail(302), 502, "answered 302"),
    (Fail(401), 502, "agl's own API key"),
    (Drop(), 502, "Is the engine running?"),
    (Raw(b"<html>hi</html>"), 502, "not a chat completion"),
    (Raw(b"{}"), 502, "not a chat completion"),
    (Raw(b'{"choices": []}'), 502, "no choices"),
    (Raw(b'{"choices": [{"index": 0, "message": 3, "finish_reason": "stop"}]}'), 502, "message"),
    (Raw(b'{"choices": [{"message": {"content": [{"type": "image", "image": "x"}]}}]}'), 502, "'image'"),
    (Raw(b'{"choices": [{"message": {"tool_calls": [{"function": {"arguments": "{}"}}]}}]}'), 502, "name"),
    (
        Raw(b'{"choices": [{"index": 0, "message": {}, "finish_reason": "stop", "token_ids": ["1"]}]}'),
        502,
        "token_ids[0]",
    ),
    (Fail(422, {"detail": [{"loc": ["n"], "msg": "too many"}]}), 422, "too many"),
    (Fail(400, {"object": "error", "message": "no grammar for this schema", "code": 400}), 400, "no grammar"),
    (Fail(429), 429, "scripted failure"),
    (OVERFLOW, 400, "maximum context length is 64 tokens"),
]


async def test_upstream_failures_become_clear_errors(stack: Stack, key: AttemptKey) -> None:
    for (step, status, says), route in itertools.product(FAILURES, ("chat/completions", "responses")):
        stack.upstream.script(step)
        response = await post(stack, key, SMALLEST[route], route)
        assert response.status_code == status, step
        assert says in error_of(response)["message"], step
        assert "Traceback" not in response.text
    assert await stack.calls(key) == []


async def test_an_upstream_that_hangs_is_given_up() -> None:
    async with running_stack(timeout=0.05) as stack:
        stack.upstream.script(Hold())
        response = await post(stack, await stack.lease())
        assert response.status_code == 504
        assert "did not answer" in error_of(response)["message"]


async def test_context_overflow_is_recognised_and_counted(stack: Stack, key: AttemptKey, client: AsyncOpenAI) -> None:
    own_words = Fail(400, {"error": {"message": "too long", "type": "x", "code": "context_length_exceeded"}})
    for step in (OVERFLOW, own_words):
        stack.upstream.script(step)
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(**GOOD)
        assert raised.value.code == "context_length_exceeded"
    assert open_attempt(stack.server.queue, key).context_overflows == 2
    await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.CRASHED, error="BadRequestError"))
    assert (await stack.server.queue.done([key.rollout]))[0].ending is Ending.CONTEXT_OVERFLOW


DEAD_ENGINE = Fail(500, {"error": {"message": "vLLM cannot answer: EngineCore is dead", "code": ENGINE_FAILED}})


@pytest.mark.parametrize(
    ("failure", "reported"),
    [
        *((failure, Ending.CRASHED) for failure in (Drop(), DEAD_ENGINE, Fail(500), Raw(b"<html>"))),
        *((failure, Ending.FINISHED) for failure in (Drop(), DEAD_ENGINE)),
    ],
)
@pytest.mark.parametrize("came_back", [False, True])
async def test_an_agent_that_broke_or_gave_up_because_the_model_server_failed_is_lost(
    stack: Stack, key: AttemptKey, client: AsyncOpenAI, failure: Step, reported: Ending, came_back: bool
) -> None:
    """It had acted, so its end would be data; once a call is answered again, it is."""
    await client.chat.completions.create(**GOOD)
    stack.upstream.script(failure)
    assert (await post(stack, key)).status_code == 502
    if came_back:
        await client.chat.completions.create(**GOOD)
    closed = await stack.server.queue.close_attempt(key, CloseRequest(ending=reported, error="502"))
    assert closed.counted is came_back
    [attempt] = await stack.store.attempts(key.rollout)
    assert attempt.ending is (reported if came_back else Ending.LOST)


async def test_a_store_that_fails_costs_the_reply_and_not_the_policy(
    stack: Stack, key: AttemptKey, client: AsyncOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    """The client may ask again; an agent that breaks of it has not failed its task: the rollout is tried again."""
    await client.chat.completions.create(**GOOD)
    stack.store.failing = True
    response = await post(stack, key)
    assert (response.status_code, error_of(response)["code"]) == (503, "store_failed")
    assert int(response.headers["retry-after"]) > 0
    assert "scripted failure" in log_of_agl(caplog)
    assert "Traceback" not in log_of_agl(caplog) + response.text
    stack.store.failing = False
    again = await post(stack, key, **{"x-stainless-retry-count": "1"})
    assert [(call.sequence, call.id) for call in await stack.calls(key)][1:] == [(1, again.json()["id"])]
    assert not (await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.CRASHED, error="500"))).counted
    [attempt] = await stack.store.attempts(key.rollout)
    assert attempt.ending is Ending.LOST


def root_of(stack: Stack, key: AttemptKey) -> str:
    return stack.url(key).removesuffix("/v1")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/{}",
        "/v1/{}/",
        "/v1//{}",
        "//v1/{}//",
        "/v1/v1/{}",
        "/{}",
        "/openai/v1/{}",
        "/v1/openai/v1/{}",
        "/openai/deployments/default/{}?api-version=2025-01-01-preview",
    ],
)
async def test_every_shape_of_path_is_served(stack: Stack, key: AttemptKey, http: httpx.AsyncClient, path: str) -> None:
    counting = {"messages/count_tokens": GOOD, "responses/input_tokens": SMALLEST["responses"]}
    headers = {"Authorization": f"Bearer {stack.key(key)}"}
    for root in (root_of(stack, key), stack.server.base_url):
        for route, body in (SMALLEST | counting).items():
            url = root + path.format(route)
            assert (await http.post(url, json=body, headers=headers)).status_code == 200, url
        listed = await http.get(root + path.format("models"), headers=headers)
        assert [model["id"] for model in listed.json()["data"]] == ["default"]
        model = await http.get(root + path.format("models/default"), headers=headers)
        assert model.json()["id"] == "default"
    assert len(await stack.calls(key)) == 8


async def test_azures_client(stack: Stack, key: AttemptKey, http: httpx.AsyncClient) -> None:
    async with openai.AsyncAzureOpenAI(
        azure_endpoint=root_of(stack, key), api_key=stack.key(key), api_version="2025-01-01-preview", max_retries=0
    ) as client:
        reply = await client.chat.completions.create(model="gpt-x", messages=HELLO)
    assert reply.choices[0].message.content
    (call,) = await stack.calls(key)
    assert call.id == reply.id
    headers = {"api-key": stack.key(key)}
    url = f"{root_of(stack, key)}/openai/deployments/gpt-x/chat/completions?api-version=1"
    named = await http.post(url, json={"messages": HELLO}, headers=headers)
    slashed = await http.post(url.replace("gpt-x", "org/gpt-x"), json={"messages": HELLO}, headers=headers)
    assert named.json()["model"] == "gpt-x", "the path names the model"
    assert slashed.json()["model"] == "org/gpt-x"


async def test_other_paths_stay_what_they_are(stack: Stack, key: AttemptKey, http: httpx.AsyncClient) -> None:
    headers = {"Authorization": f"Bearer {stack.key(key)}"}
    for path in ("/files", "//agl/v1/lease", "/v1/agl/v1/lease", "/openai/deployments/x", "/v1", "/"):
        for root in (root_of(stack, key), stack.server.base_url):
            assert (await http.post(root + path, json={}, headers=headers)).status_code == 404, path


SOUND = bytes(range(256)) * 4000


@dataclass
class OtherServer:
    """Serves embeddings, speech (streamed), transcriptions and one model; it keeps what it was sent."""

    received: list[web.Request] = field(default_factory=list)
    transcribed: list[tuple[str, bytes, str]] = field(default_factory=list)
    url: str = ""

    async def embed(self, request: web.Request) -> web.Response:
        self.received.append(request)
        body = await request.json()
        if body["model"] == "unknown":
            error = {"message": "no such model", "type": "x", "param": "model", "code": "model_not_found"}
            return web.json_response({"error": error}, status=404)
        data = [{"object": "embedding", "index": 0, "embedding": [0.25, 0.5]}]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return web.json_response({"object": "list", "data": data, "model": body["model"], "usage": usage})

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
    server, app = OtherServer(), web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/embeddings", server.embed)
    app.router.add_post("/v1/audio/speech", server.speak)
    app.router.add_post("/v1/audio/transcriptions", server.transcribe)
    app.router.add_get("/v1/files", server.embed)
    async with served(app) as url:
        server.url = f"{url}/v1"
        yield server


@pytest.fixture
async def stack(other: OtherServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    monkeypatch.setattr("agl_server.http.listening.MAX_AGENT_BODY", 2 << 20)
    gateway = GatewaySection(passthrough=PassthroughSection(url=other.url))
    keys = Keys(passthrough="key-of-the-other")
    async with running_stack(store=MemoryStore(), gateway=gateway, keys=keys) as running:
        yield running


async def test_embeddings_are_passed_on_with_a_key_of_their_own_and_not_recorded(
    stack: Stack, key: AttemptKey, client: AsyncOpenAI, other: OtherServer
) -> None:
    reply = await client.embeddings.create(model="embedder", input="hello", encoding_format="float")
    assert reply.data[0].embedding == [0.25, 0.5]
    [received] = other.received
    assert received.headers["Authorization"] == "Bearer key-of-the-other"
    assert stack.key(key) not in str(received.headers)
    with pytest.raises(openai.NotFoundError, match="no such model") as raised:
        await client.embeddings.create(model="unknown", input="x")
    assert raised.value.code == "model_not_found", "its errors are passed on, too"
    assert (await stack.calls(key), stack.upstream.received) == ([], [])
    await client.chat.completions.create(**GOOD)
    assert (await closed(stack, key)).passed_through == {"embeddings": 2}


async def test_speech_is_streamed_and_transcriptions_are_uploaded(client: AsyncOpenAI, other: OtherServer) -> None:
    speech = client.audio.speech.with_streaming_response.create(model="tts", voice="alloy", input="hello")
    async with speech as reply:
        assert reply.headers["content-type"] == "audio/mpeg"
        assert b"".join([part async for part in reply.iter_bytes()]) == SOUND
    text = await client.audio.transcriptions.create(model="stt", file=("said.mp3", SOUND))
    assert text.text == "hello"
    assert other.transcribed == [("said.mp3", SOUND, "stt")]


async def test_models_are_listed_as_anthropics_client_reads_them(stack: Stack, key: AttemptKey) -> None:
    url = stack.url(key).removesuffix("/v1")
    async with anthropic.AsyncAnthropic(
        base_url=url, api_key=stack.key(key), _strict_response_validation=True
    ) as client:
        listed = [model async for model in client.models.list()]
        assert [(model.id, model.display_name) for model in listed] == [("default", "default")]
        assert (await client.models.retrieve("default")) == listed[0]


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


async def test_an_agent_without_a_key_or_after_its_end_gets_nothing(
    stack: Stack, key: AttemptKey, other: OtherServer
) -> None:
    with pytest.raises(openai.AuthenticationError):
        await stack.client(key, api_key="nonsense").embeddings.create(model="m", input="x")
    await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.FINISHED))
    with pytest.raises(openai.APIStatusError) as raised:
        await stack.client(key).embeddings.create(model="m", input="x")
    assert raised.value.status_code == 410
    assert other.received == []


async def test_no_other_route_is_reached(stack: Stack, key: AttemptKey, other: OtherServer) -> None:
    headers = {"Authorization": f"Bearer {stack.key(key)}"}
    async with httpx2.AsyncClient(trust_env=False) as client:
        for route in ("files", "models/..%2Ffiles", "models/%252e%252e/files", "embeddings/../files"):
            assert (await client.get(f"{stack.url(key)}/{route}", headers=headers)).status_code in (404, 405), route
        assert (await client.delete(f"{stack.url(key)}/models/m", headers=headers)).status_code in (404, 405)
    assert other.received == []


async def test_a_server_that_is_away() -> None:
    section = GatewaySection(passthrough=PassthroughSection(url="http://127.0.0.1:9/v1"))
    async with running_stack(gateway=section) as stack:
        with pytest.raises(openai.InternalServerError, match=r"http://127\.0\.0\.1:9/v1 cannot be asked"):
            await stack.client(await stack.lease()).embeddings.create(model="m", input="x")
