"""The routes below /engine: how a run controls its engine process."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agl_core.errors import AglError
from agl_core.wire.updates import UpdateRequest, encode_result
from agl_torch.policies import Policies, memory
from agl_torch.serve import EngineLoop

PROGRESS_STEP = 0.01
"""Progress is reported when it grew by this share."""
_log = logging.getLogger(__name__)
Endpoint = Callable[[Request], Awaitable[Response]]


def control_routes(policies: Policies, loop: EngineLoop, *, key: str) -> list[Route]:
    """Every route needs `Authorization: Bearer <key>`; an error is a JSON object with `error` and its class.

    - `POST /engine/update`: body `UpdateRequest`; answers lines of JSON, `{"progress": share}` and at the end
      `{"result": …}` or `{"error": …}`;
    - `POST /engine/save`, `POST /engine/load`: body `{"folder": path}`;
    - `GET /engine/stats`, `GET /engine/versions`, `GET /engine/health`.
    """

    async def update(request: Request) -> Response:
        asked = UpdateRequest.decode(await request.body())
        return StreamingResponse(_updating(policies, loop, asked), media_type="application/x-ndjson")

    async def save(request: Request) -> Response:
        folder = Path(orjson.loads(await request.body())["folder"])
        await loop.run_exclusive(lambda: policies.save(folder))
        return _json({})

    async def load(request: Request) -> Response:
        folder = Path(orjson.loads(await request.body())["folder"])
        await loop.run_exclusive(lambda: policies.restore(folder))
        return _json({})

    async def stats(request: Request) -> Response:
        tokens = {f"tokens_{name}": float(value) for name, value in loop.counters().items() if name != "preempted"}
        preempted = {"preempted": float(loop.counters()["preempted"])}
        return _json(tokens | preempted | memory(policies.policies.values()))

    async def versions(request: Request) -> Response:
        return _json(policies.versions)

    async def health(request: Request) -> Response:
        return _json({"policies": sorted(policies.policies)})

    routes: list[tuple[str, Endpoint, str]] = [
        ("update", update, "POST"),
        ("save", save, "POST"),
        ("load", load, "POST"),
        ("stats", stats, "GET"),
        ("versions", versions, "GET"),
        ("health", health, "GET"),
    ]
    return [Route(f"/engine/{name}", _guarded(endpoint, key), methods=[method]) for name, endpoint, method in routes]


async def _updating(policies: Policies, loop: EngineLoop, asked: UpdateRequest) -> AsyncIterator[bytes]:
    """The lines of an update's reply. The update runs to its end even if nobody listens any more."""
    here = asyncio.get_running_loop()
    shares: asyncio.Queue[float | None] = asyncio.Queue()
    reported = 0.0

    def report(share: float) -> None:
        nonlocal reported
        if share >= reported + PROGRESS_STEP or share == 1.0:
            reported = share
            here.call_soon_threadsafe(shares.put_nowait, share)

    job = asyncio.ensure_future(loop.run_exclusive(lambda: policies.update(asked, report)))
    job.add_done_callback(lambda _: shares.put_nowait(None))
    while (share := await shares.get()) is not None:
        yield _line({"progress": share})
    try:
        yield _line({"result": encode_result(job.result())})
    except Exception as error:
        yield _line(_described(error))


def _guarded(endpoint: Endpoint, key: str) -> Endpoint:
    async def checked(request: Request) -> Response:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {key}".encode()):
            return _json({"error": "wrong control key", "kind": "EngineError"}, status=401)
        try:
            return await endpoint(request)
        except Exception as error:
            return _json(_described(error), status=500)

    return checked


def _described(error: Exception) -> dict[str, str]:
    """An error on purpose crosses as it is; any other with its type, and its traceback goes to the log."""
    if isinstance(error, AglError):
        return {"error": str(error), "kind": type(error).__name__}
    _log.error("The engine failed.", exc_info=error)
    return {"error": f"{type(error).__name__}: {error}", "kind": "EngineError"}


def _line(value: Any) -> bytes:
    return orjson.dumps(value) + b"\n"


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
