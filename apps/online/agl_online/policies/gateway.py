"""Answers model calls by served policies, in every dialect; nothing is recorded."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace

from starlette.applications import Starlette
from starlette.datastructures import URL
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from agl_core.errors import ServerError
from agl_core.protocols import Upstream
from agl_core.server.answered import Answered, Exchange
from agl_core.server.api import unless_gone
from agl_core.server.dialects.dialect import Dialect, ModelRequest
from agl_core.server.errors import ApiError, as_answer
from agl_core.server.gateway import forwarded
from agl_core.server.keys import carries, is_loopback
from agl_core.server.listening import Listening, Refusals
from agl_core.server.reply import Reply, read_reply
from agl_core.server.routes import ModelCalls, models_routes, unserved
from agl_core.server.upstream import UpstreamClient
from agl_core.wire.keys import problem_of_key
from agl_online.policies.shelf import Shelf
from agl_online.wire import HEADER_ANSWERED

POLICY_KEY = "AGL_POLICY_KEY"
"""The environment variable with the key that clients of served policies need."""
_LONGEST = 600.0
"""Seconds that a call may take."""


class PolicyServer:
    """Serves the policies of a shelf over HTTP, on the event loop that starts it.

    Without `key`, every request that reaches the port is answered. The port must then be of this machine alone
    (`check_key`), and requests for another host name are refused: a web page could send them.
    """

    def __init__(self, shelf: Shelf, upstream: Upstream, listening: Listening, key: str | None) -> None:
        self._shelf, self._key = shelf, key
        self._upstream = replace(upstream, returns_ids=False)
        self._client = UpstreamClient(upstream, _LONGEST)
        self._answered = Answered()
        self._listening = listening

    @property
    def base_url(self) -> str:
        return self._listening.base_url

    async def start(self) -> None:
        await self._listening.start(ModelCalls(self._app(), self), Refusals())

    async def stop(self) -> None:
        """Finish the calls in flight, which get a few seconds, and close the port."""
        await self._listening.stop()
        self._client.close()

    async def answer(self, request: Request, dialect: Dialect) -> Response:
        try:
            self._check(request)
            raw = await request.body()
            asked = dialect.parse(raw, self._answered)
            if not asked.model:
                policies = {each.reference.name for each in self._shelf.wanted}
                asked = asked.named(request.path_params.get("deployment"), policies)
            served = self._shelf.served(asked.model)
            with served.answering():
                reply = await unless_gone(request, self._reply(dialect, asked, served.model, served.max_tokens))
            if reply is None:
                return Response(status_code=499)
            if not dialect.counts:
                self._answered.remember(Exchange(0), reply, asked.conversation, len(raw))
            response = dialect.render(asked, reply)
            response.headers.update({HEADER_ANSWERED: str(served.version), **asked.notes(reply)})
            return response
        except Exception as error:
            return dialect.refuse(as_answer(error, request.url.path))

    async def _reply(self, dialect: Dialect, asked: ModelRequest, model: str, max_tokens: int) -> Reply:
        limit = max_tokens if asked.requested.max_tokens is None else asked.requested.max_tokens
        upstream = replace(self._upstream, models={model: model})
        body = forwarded(upstream, asked.chat, replace(asked.requested, max_tokens=limit), model, trains=False)
        if asked.logprobs:
            body["logprobs"] = True
        payload, headers = await self._client.complete(body, None)
        return read_reply(payload, headers, f"{dialect.id_prefix}{uuid.uuid4().hex}", logprobs=asked.logprobs)

    def _check(self, request: Request) -> None:
        """ApiError 401 without the key; without a key at all, 403 for requests by another name than this machine's."""
        if self._key is not None:
            if not carries(request, self._key):
                raise ApiError(
                    401,
                    f"The API key (Authorization: Bearer …, or x-api-key) is missing or wrong. It is the value of "
                    f"{POLICY_KEY} where `agl policy serve` was started.",
                    code="invalid_api_key",
                )
            return
        names = [f"http://{request.headers.get('host', '')}", request.headers.get("origin", "http://localhost")]
        if not all(is_loopback(URL(name).hostname or "") for name in names):
            raise ApiError(
                403,
                f"Without a key, served policies answer only to this machine's own names, such as 127.0.0.1. Start "
                f"`agl policy serve` with {POLICY_KEY} set, and send its value.",
                code="foreign_name",
            )

    def _app(self) -> ASGIApp:
        async def models(request: Request) -> Mapping[str, Mapping[str, str]]:
            self._check(request)
            return {name: {"root": str(served.version)} for name, served in self._shelf.names.items()}

        async def unknown(request: Request, error: Exception) -> Response:
            return unserved(request, error, "agl policy serve", ", and GET /v1/models")

        return Starlette(routes=models_routes("", models), exception_handlers={404: unknown, 405: unknown})


def check_key(host: str, key: str | None) -> None:
    """ServerError if the key is invalid, or there is none and others can reach `host`."""
    if key is not None and (problem := problem_of_key(POLICY_KEY, key)):
        raise ServerError(problem)
    if key is None and not is_loopback(host):
        raise ServerError(
            f"Policies are not served on {host}, where other machines can reach them, without a key. Set {POLICY_KEY} "
            f"here (`openssl rand -hex 24` makes one), which clients send as their API key, or use host 127.0.0.1."
        )
