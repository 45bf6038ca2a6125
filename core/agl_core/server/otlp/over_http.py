"""OTLP over HTTP: POST …/v1/traces."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from google.protobuf.json_format import MessageToJson  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]
from google.rpc.code_pb2 import Code  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl_core.errors import StoreError
from agl_core.server.errors import ApiError
from agl_core.server.http.limits import decompressed
from agl_core.server.otlp import decoding
from agl_core.server.otlp.service import TraceService

logger = logging.getLogger(__name__)

_JSON, _PROTOBUF = "application/json", "application/x-protobuf"
_CODES = {
    400: Code.INVALID_ARGUMENT,
    401: Code.UNAUTHENTICATED,
    404: Code.NOT_FOUND,
    413: Code.RESOURCE_EXHAUSTED,
    415: Code.INVALID_ARGUMENT,
    503: Code.UNAVAILABLE,
}
_RETRY_AFTER = "1"
"""Seconds."""


def traces_route(path: str, service: TraceService) -> Route:
    """The route that takes exports at `path`, which may name the attempt by `{rollout}` and `{attempt}`."""

    async def export(request: Request) -> Response:
        kind = _content_type(request)
        try:
            return await _export(request, kind, service)
        except ApiError as refused:
            error = refused
        except StoreError as failed:
            error = ApiError(503, f"The spans could not be stored: {failed}")
        except Exception:
            logger.exception("The OTLP intake failed in POST %r", request.url.path)
            error = ApiError(500, "agl's OTLP intake failed; the server's log says why.")
        status = Status(code=_CODES.get(error.status, Code.INTERNAL), message=error.message)
        headers = {"Retry-After": _RETRY_AFTER} if error.status == 503 else None
        return _response(status, kind, error.status, headers)

    return Route(path, export, methods=["POST"])


async def _export(request: Request, kind: str, service: TraceService) -> Response:
    sender = await service.check(request)
    if kind not in (_JSON, _PROTOBUF):
        raise ApiError(415, f"Content-Type {kind!r} is not known here: send {_PROTOBUF} or {_JSON}.")
    body = await _body(request)
    encoding = request.headers.get("content-encoding", "").strip().lower()
    plain = await asyncio.to_thread(decompressed, body, encoding, decoding.MAX_BYTES, decoding.too_large())
    decode = decoding.decode_json if kind == _JSON else decoding.decode_protobuf
    return _response(await service.export(await asyncio.to_thread(decode, plain), sender), kind)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > decoding.MAX_BYTES:
            raise decoding.too_large()
    return bytes(body)


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _response(message: Message, kind: str, status: int = 200, headers: dict[str, Any] | None = None) -> Response:
    """The message in the encoding of the request."""
    if kind == _PROTOBUF:
        return Response(message.SerializeToString(), status, headers, _PROTOBUF)
    return Response(MessageToJson(message, indent=None), status, headers, _JSON)
