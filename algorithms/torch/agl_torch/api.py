"""The OpenAI-compatible HTTP API of the torch engine."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

import orjson
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from agl_core.errors import AglError, nearest
from agl_core.wire.headers import HEADER_IGNORED, HEADER_POLICY, HEADER_ROLLOUT
from agl_torch.chat import ChatError
from agl_torch.loop import EngineLoop
from agl_torch.model_server import Exchange, ModelServer, parse_request
from agl_torch.sampling import Generated

_LONGEST_NOTE = 1000
"""Characters."""
Endpoint = Callable[[HttpRequest], Awaitable[HttpResponse]]


def create_app(models: Mapping[str, ModelServer], loop: EngineLoop, *, api_key: str) -> Starlette:
    """`GET /v1/models` and `POST /v1/chat/completions` for these models, by the name that clients ask for.

    Every request needs `Authorization: Bearer <api_key>`. The header `x-agl-rollout` names the session whose earlier
    replies are recognised when they are echoed. The caller starts and stops `loop`.
    """
    started = int(time.time())

    async def list_models(request: HttpRequest) -> HttpResponse:
        entries = [
            {
                "id": name,
                "object": "model",
                "created": started,
                "owned_by": "agl",
                "max_model_len": model.context_length,
            }
            for name, model in list(models.items())
        ]
        return _json({"object": "list", "data": entries})

    async def chat_completions(request: HttpRequest) -> HttpResponse:
        chat = parse_request(_decoded(await request.body()))
        model = models.get(chat.model)
        if model is None:
            raise ChatError(
                f"There is no model {chat.model!r}. {nearest(chat.model, models)}",
                param="model",
                code="model_not_found",
                status=404,
            )
        exchange = model.begin(chat, request.headers.get(HEADER_ROLLOUT))
        generated = await _unless_gone(request, loop, model, exchange)
        if generated is None:
            return HttpResponse(status_code=499)
        body = {"created": int(time.time()), **model.finish(exchange, generated)}
        headers = {HEADER_POLICY: str(generated.version)}
        if exchange.ignored:
            # A name may be anything, and a header may not.
            headers[HEADER_IGNORED] = quote(", ".join(exchange.ignored), safe=", ")[:_LONGEST_NOTE]
        return _json(body, headers=headers)

    return Starlette(
        routes=[
            Route("/v1/models", _guarded(list_models, api_key), methods=["GET"]),
            Route("/v1/chat/completions", _guarded(chat_completions, api_key), methods=["POST"]),
        ]
    )


def _guarded(endpoint: Endpoint, api_key: str) -> Endpoint:
    """An endpoint that asks for the bearer key, and whose agl errors become OpenAI-shaped replies."""

    async def checked(request: HttpRequest) -> HttpResponse:
        try:
            sent = request.headers.get("authorization", "")
            if not hmac.compare_digest(sent.encode(), f"Bearer {api_key}".encode()):
                raise ChatError(
                    "Wrong API key: send 'Authorization: Bearer <key>' with the key of this run's engine.",
                    code="invalid_api_key",
                    status=401,
                )
            return await endpoint(request)
        except ChatError as error:
            return _json(error.body, status=error.status)
        except AglError as error:
            return _json(ChatError(str(error), code="engine_error", status=500).body, status=500)

    return checked


async def _unless_gone(
    request: HttpRequest, loop: EngineLoop, model: ModelServer, exchange: Exchange
) -> Generated | None:
    """Generate, but give up when the client hangs up."""
    generating = asyncio.ensure_future(loop.generate(model.name, exchange.request))
    watching = asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait({generating, watching}, return_when=asyncio.FIRST_COMPLETED)
        return generating.result() if generating.done() else None
    finally:
        generating.cancel()
        watching.cancel()


async def _hang_up(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _decoded(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ChatError(f"The request body is no JSON: {error}.") from None


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpResponse:
    return HttpResponse(orjson.dumps(body), status, headers, media_type="application/json")
