"""Requests that no policy answers: they are passed on as they are, counted, and not recorded.

Agents with retrieval ask for embeddings beside their model calls, others for moderations, speech or images. They go to
the model server, or to a server of their own, with a key that agents never see.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import unquote

import httpx
import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agl_core.config.models import PassthroughSection
from agl_core.server.attempt import ActiveAttempt
from agl_core.server.errors import ApiError, openai_error
from agl_core.server.gateway.gateway import Gateway

PASSED_ON = frozenset(
    {
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/embeddings",
        "/v1/images/edits",
        "/v1/images/generations",
        "/v1/images/variations",
        "/v1/moderations",
        "/v1/rerank",
    }
)
"""Routes of POST requests. No other is passed on: the key would let agents reach files, and make other model calls."""
_MODEL = "/v1/models/"
_REQUEST_HEADERS = ("accept", "content-type")
_REPLY_HEADERS = ("content-type", "content-encoding", "content-disposition", "retry-after", "x-request-id")
_NOT_SERVED = (404, 405, 501)
_CONNECT = 10.0
_ANSWER = 120.0
"""Seconds until a reply begins: a batch of embeddings, or an image."""
_SETTING = (
    "To have it served, name a server that does in the run's configuration: [gateway.passthrough] url = "
    '"https://…/v1" and api_key_env = "VARIABLE".'
)


def is_passed_on(method: str, route: str) -> bool:
    """Whether a request is passed on; `route` begins with /v1/.

    >>> is_passed_on("POST", "/v1/embeddings"), is_passed_on("GET", "/v1/models/../files")
    (True, False)
    """
    if method == "POST":
        return route in PASSED_ON
    name = unquote(unquote(route)).removeprefix(_MODEL)
    return method == "GET" and route.startswith(_MODEL) and bool(name) and ".." not in name.split("/")


class Passthrough:
    """Passes requests that `is_passed_on` accepts to the server that `settings` name, or else to the model server."""

    def __init__(self, gateway: Gateway, settings: PassthroughSection, api_key: str | None) -> None:
        self._gateway = gateway
        self._url, self._api_key = settings.url, api_key
        self._client: httpx.AsyncClient | None = None

    async def answer(self, request: Request, route: str) -> Response:
        """The other server's reply, as it comes."""
        attempt: ActiveAttempt | None = None
        try:
            attempt = await self._gateway.attribution.open(request)
            own = self._own_model(route, attempt)
            return own if own is not None else await self._passed_on(request, route, attempt)
        except ApiError as refused:
            if attempt is not None:
                attempt.count_failure(refused)
            return openai_error(refused)

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def _own_model(self, route: str, attempt: ActiveAttempt) -> Response | None:
        name = route.removeprefix(_MODEL)
        if not route.startswith(_MODEL) or name not in self._gateway.models(attempt):
            return None
        model = {"id": name, "object": "model", "created": 0, "owned_by": "agl"}
        return Response(orjson.dumps(model), media_type="application/json")

    async def _passed_on(self, request: Request, route: str, attempt: ActiveAttempt) -> Response:
        base, key = self._destination(attempt)
        url = f"{base.rstrip('/')}{_raw_route(request)}"
        body = await request.body()
        headers = {name: request.headers[name] for name in _REQUEST_HEADERS if name in request.headers}
        headers |= {"Accept-Encoding": "identity"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        self._gateway.count_unrecorded(attempt, route.removeprefix("/v1/") if request.method == "POST" else "models")
        if self._client is None:
            # A proxy of the environment is for servers elsewhere; the model server is asked directly everywhere.
            timeout = httpx.Timeout(_ANSWER, connect=_CONNECT)
            self._client = httpx.AsyncClient(timeout=timeout, trust_env=self._url is not None)
        client = self._client
        try:
            async with asyncio.timeout(_ANSWER):
                asked = client.build_request(request.method, url, headers=headers, content=body)
                reply = await client.send(asked, stream=True)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _failed(504, f"The server at {base} did not answer {route} in {_ANSWER:g} seconds.") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _failed(502, f"The server at {base} cannot be asked for {route}: {error}.") from error
        kept = {name: reply.headers[name] for name in _REPLY_HEADERS if name in reply.headers}
        if reply.is_success:
            return StreamingResponse(_content(reply), reply.status_code, kept)
        content = b"".join([part async for part in _content(reply)])
        raise_unserved(reply.status_code, content, base, f"{request.method} {route}")
        return Response(content, reply.status_code, kept)

    def _destination(self, attempt: ActiveAttempt) -> tuple[str, str | None]:
        if self._url is not None:
            return self._url, self._api_key
        served = self._gateway.served(attempt)
        return served.client.router.of(attempt.key.rollout), served.upstream.api_key


async def _content(reply: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in reply.aiter_raw():
            yield part
    finally:
        await reply.aclose()


def raise_unserved(status: int, content: bytes, base: str, what: str) -> None:
    """ApiError if an error says that the server has no such route, refuses agl's key, or sends elsewhere."""
    if status in (401, 403):
        raise _failed(502, f"The server at {base} refuses agl's own API key for {what}. {_SETTING}")
    if status < 400:
        raise _failed(502, f"The server at {base} answered {what} with status {status}, a redirection. {_SETTING}")
    if status in _NOT_SERVED and not _names_model(content):
        raise ApiError(
            404,
            f"The server at {base} does not serve {what}: it answered {status}. {_SETTING}",
            type="upstream_error",
            code="not_served",
        )


def _names_model(content: bytes) -> bool:
    """Whether an error is about the model that was asked for."""
    try:
        error = orjson.loads(content)["error"]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return False
    texts = (error.get("code"), error.get("param")) if isinstance(error, dict) else ()
    return any(isinstance(text, str) and "model" in text for text in texts)


def _raw_route(request: Request) -> str:
    """The route without /v1 as it was sent, with its query."""
    raw: str = request.scope["raw_path"].decode("latin-1")
    query = request.scope["query_string"].decode("latin-1")
    return raw[raw.index("/v1/") + len("/v1") :] + (f"?{query}" if query else "")


def _failed(status: int, message: str) -> ApiError:
    return ApiError(status, message, type="upstream_error", code="passthrough_failed")
