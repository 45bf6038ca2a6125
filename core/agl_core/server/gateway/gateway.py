"""The gateway: it stands between agents and the model server, and is the only source of recorded tokens.

For each call: whose is it (attempt), what may it ask for (the mode's sampling), forward it, record it, and only
then answer. What differs between APIs is in their dialects.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agl_core.capture import unpack_variables
from agl_core.config.policies import policy_of
from agl_core.errors import StoreError, StoreRefusedError, nearest
from agl_core.server.dialects.dialect import Dialect, ModelRequest
from agl_core.server.dialects.replies import ReplyMemories, ReplyMemory
from agl_core.server.errors import ApiError, as_answer, attempt_closed, stopping, store_failed
from agl_core.server.gateway.attribution import Attribution
from agl_core.server.gateway.reply import Reply, read_reply
from agl_core.server.gateway.retries import Exchange
from agl_core.server.gateway.sampling import call_seed, effective_sampling, forwarded
from agl_core.server.gateway.unusual import explained
from agl_core.server.gateway.upstream import Answering, Destination
from agl_core.server.http.protocol import CONNECTION, CorkedHttp
from agl_core.server.rollouts.attempt import ActiveAttempt
from agl_core.store.interface import Store
from agl_core.types import Call, Mode
from agl_core.wire.headers import (
    HEADER_AGENT,
    HEADER_CALL,
    HEADER_PARENT_SPAN,
    HEADER_ROLLOUT,
    HEADER_STATE,
    HEADER_TRACE,
    trace_of,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What the gateway counted since its start."""

    calls: int = 0
    """Calls recorded."""
    without_ids: int = 0
    """Recorded calls for which the upstream returned no token ids."""
    retried: int = 0
    """Requests that were a client's own retry of an earlier one."""
    late: int = 0
    """Recorded calls that ended after their attempt was closed."""
    undelivered: int = 0
    """Recorded calls whose replies reached no client, as far as the connections show."""
    passed_through: int = 0
    """Requests that were passed on and not recorded."""
    upstream_errors: int = 0
    """Calls that the upstream refused or failed."""


class _Delivery(Response):
    """Sends a reply, if its client is still there, and then reports whether it arrived."""

    def __init__(self, reply: Response, client: CorkedHttp, report: Callable[[bool], Awaitable[None]]) -> None:
        self._reply, self._client, self._report = reply, client, report
        self.raw_headers = reply.raw_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = False
        if not self._client.is_gone:
            await self._reply(scope, receive, send)
            arrived = await self._client.has_sent()
        await self._report(arrived)


class Gateway:
    """Answers agents' model calls, by way of what `relay` forwards to; those of sessions by way of `deployed`."""

    def __init__(self, attribution: Attribution, store: Store, relay: Answering, deployed: Answering) -> None:
        self.counters = Counters()
        self.attribution = attribution
        self._store, self._relay, self._deployed = store, relay, deployed
        self._memories = ReplyMemories()
        self._calls: dict[asyncio.Future[Reply], asyncio.Task[Any]] = {}
        """Calls in flight, and the requests that make them."""

    def served(self, attempt: ActiveAttempt) -> Destination:
        """What answers the calls of an attempt; ApiError 503 while nothing does."""
        return self._to(attempt).served()

    def models(self, attempt: ActiveAttempt) -> list[str]:
        """The names that its agent may ask for; ApiError 503 while nothing answers."""
        return sorted(self.served(attempt).upstream.models)

    def _to(self, attempt: ActiveAttempt) -> Answering:
        return self._deployed if attempt.mode is Mode.USE else self._relay

    async def answer(self, request: Request, dialect: Dialect) -> Response:
        """One model call, from the agent's request to the agent's reply, and whether it arrived."""
        attempt: ActiveAttempt | None = None
        try:
            attempt = await self.attribution.open(request)
            raw = await request.body()
            memory = self._memories.of(attempt)
            asked = dialect.parse(raw, memory)
            if not asked.model:
                asked = asked.named(request.path_params.get("deployment"), self.models(attempt))
            if dialect.counts:
                return dialect.render(asked, await self._counted(attempt, dialect, asked, request.headers), memory)
            exchange = self._exchange(request, attempt, dialect, raw, asked)
            client: CorkedHttp = request.scope[CONNECTION]
            exchange.waiting.append(client)
            reply = await self._reply(request, attempt, exchange, dialect, asked)
            memory = self._memories.of(attempt)
            memory.add(reply, asked.conversation)
            response = dialect.render(asked, reply, memory)
            self._memories.bound(attempt)
            response.headers.update({HEADER_CALL: reply.id, **attempt.reply_headers, **asked.notes(reply)})
            return _Delivery(response, client, functools.partial(self._delivered, attempt, exchange))
        except Exception as error:
            failure = as_answer(error, request.url.path)
            if attempt is not None:
                attempt.count_failure(failure)
            return dialect.refuse(failure)

    async def memory(self, request: Request) -> ReplyMemory:
        """What is kept of the replies to the attempt that a request belongs to; ApiError as of `Attribution.open`."""
        return self._memories.of(await self.attribution.open(request))

    async def _counted(self, attempt: ActiveAttempt, dialect: Dialect, asked: ModelRequest, stamps: Headers) -> Reply:
        """A reply to no call, which says how long the prompt is."""
        attempt.passed_through[dialect.api] = attempt.passed_through.get(dialect.api, 0) + 1
        self.counters.passed_through += 1
        with self._to(attempt).answering(attempt) as served:
            policy = _policy(served, asked.model, _agent(stamps))
            body = forwarded(served.upstream, asked.chat, asked.requested, policy, trains=False)
            payload, headers = await served.client.complete(body, None)
            return read_reply(payload, headers, "", logprobs=False)

    async def _delivered(self, attempt: ActiveAttempt, exchange: Exchange, arrived: bool) -> None:
        """Record whether a reply arrived, if that is not what is recorded; its retry may arrive later."""
        await self._record_delivery(attempt, exchange, arrived)
        await attempt.delivered(arrived)

    async def _record_delivery(self, attempt: ActiveAttempt, exchange: Exchange, arrived: bool) -> None:
        if exchange.call is None:
            return
        exchange.arrived |= arrived
        call = exchange.call
        if call.undelivered is exchange.arrived and not attempt.closed:
            call = exchange.call = replace(call, undelivered=not exchange.arrived)
            self.counters.undelivered += 1 if call.undelivered else -1
            with contextlib.suppress(ApiError):  # It is logged, and no client waits for an answer.
                await self._commit(attempt, call, None, _this_task())
        if exchange.arrived:
            exchange.call = None
            exchange.waiting.clear()

    async def stop(self) -> None:
        """Give up the calls that are still in flight."""
        for request in self._calls.values():
            request.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _exchange(
        self, request: Request, attempt: ActiveAttempt, dialect: Dialect, raw: bytes, asked: ModelRequest
    ) -> Exchange:
        """That of the call which this request retries, or a new one."""
        headers = request.headers
        exchange = attempt.retries.find(dialect.api, headers, raw)
        if exchange is None:
            earlier = attempt.retries.unanswered(dialect.api, headers, asked.recorded)
            sequence = attempt.next_sequence() if earlier is None else earlier.sequence
            exchange = attempt.retries.add(dialect.api, headers, raw, sequence)
            exchange.supersedes = earlier
            self.counters.retried += earlier is not None
        else:
            self.counters.retried += 1
        return exchange

    async def _reply(
        self, request: Request, attempt: ActiveAttempt, exchange: Exchange, dialect: Dialect, asked: ModelRequest
    ) -> Reply:
        """Make the call, or join the one that this request retries. A client that hangs up does not end it."""
        if exchange.kept is not None:
            return exchange.kept.read()
        if exchange.reply is None:
            reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            exchange.reply = reply
            self._calls[reply] = _this_task()
            try:
                made = await self._call(attempt, exchange, reply, dialect, asked, request.headers)
                exchange.kept = made.raw
                reply.set_result(made)
            except asyncio.CancelledError:
                reply.set_exception(stopping())
            except Exception as error:
                reply.set_exception(error)
            del self._calls[reply]
            attempt.retries.ended(exchange)
            return reply.result()
        return await asyncio.shield(exchange.reply)

    async def _call(
        self,
        attempt: ActiveAttempt,
        exchange: Exchange,
        done: asyncio.Future[Reply],
        dialect: Dialect,
        asked: ModelRequest,
        stamps: Headers,
    ) -> Reply:
        with self._to(attempt).answering(attempt) as served:
            started = time.time()
            agent = _agent(stamps)
            policy = _policy(served, asked.model, agent)
            version = served.versions.get(policy)  # For an upstream that does not name it: the one at the call's start.
            seed = call_seed(served.settings.seed, attempt.rollout, attempt.record.attempt, exchange.sequence)
            effective = effective_sampling(attempt.rollout, asked.requested, served.settings.sampling, seed)
            attempt.asking[exchange.sequence] = started
            try:
                payload, headers = await served.client.complete(
                    forwarded(served.upstream, asked.chat, effective, policy, trains=attempt.mode.trains), attempt.key
                )
                reply = read_reply(payload, headers, attempt.call_id(dialect.id_prefix), logprobs=asked.logprobs)
            except ApiError as refused:
                self.counters.upstream_errors += 1
                raise explained(refused, asked.chat) from refused
            finally:
                attempt.asking.pop(exchange.sequence, None)
                attempt.answered = time.time()
            late = attempt.closed
            call = Call(
                id=reply.id,
                rollout=attempt.record.rollout,
                attempt=attempt.record.attempt,
                sequence=exchange.sequence,
                policy=policy,
                version=version if reply.version is None else reply.version,
                request=asked.recorded,
                choices=reply.choices,
                started=started,
                ended=time.time(),
                api=dialect.api,
                agent=agent,
                parent_span=stamps.get(HEADER_PARENT_SPAN),
                state=unpack_variables(stamps.get(HEADER_STATE)),
                prompt_ids=reply.prompt_ids,
                requested=asked.requested,
                effective=effective,
                prefix_broken=reply.prefix_broken,
                prefilled=reply.prefilled,
                reused=reply.reused,
                late=late,
                retry_of=exchange.marker,
                undelivered=all(client.is_gone for client in exchange.waiting),
                stamped=HEADER_ROLLOUT in stamps,
                trace=trace_of(stamps.get(HEADER_TRACE)),
            )
            await self._commit(attempt, call, exchange.supersedes, done)
            attempt.completed_calls += not late
            exchange.call = None if late else call
            self.counters.undelivered += call.undelivered and not late
            self.counters.calls += 1
            self.counters.without_ids += not reply.has_ids
            self.counters.late += late
            if late and attempt.refuses_late:
                raise attempt_closed(*attempt.key)
            return reply

    async def _commit(
        self, attempt: ActiveAttempt, call: Call, superseded: Call | None, done: asyncio.Future[Any]
    ) -> None:
        """Write the call; an attempt that is closed meanwhile waits until it is `done`, so that the count is right.

        The call that it supersedes does not count any more: its reply never arrived.
        """
        attempt.committing.add(done)
        try:
            if call.late or superseded is None:
                await attempt.keep(self._store, call)
            else:
                await attempt.keep(self._store, call, replace(superseded, late=True))
        except StoreRefusedError:
            raise
        except StoreError as failed:
            logger.error("A call of attempt %s/%s is not recorded, nor answered: %s", *attempt.key, failed)
            raise store_failed() from failed
        finally:
            attempt.committing.discard(done)


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _policy(served: Destination, model: str, agent: str | None) -> str:
    """The policy that answers a call; ApiError 404 if there is none."""
    policies = served.upstream.models
    found = policy_of(agent, model, served.settings.agents, policies)
    if found is not None:
        return found
    caller = f"the agent {agent!r}" if agent else "a call without an agent's name"
    unknown = f"The model server lists no model {model!r}."
    if served.settings.agents:
        unknown = (
            f"The run trains several policies: none has {caller} among its `agents` ([policies.NAME] agents), and none "
            f"is named {model!r} or 'default'."
        )
    raise ApiError(
        404,
        f"{unknown} {nearest(model, policies)}",
        param="model",
        code="model_not_found",
    )


def _agent(headers: Headers) -> str | None:
    name = headers.get(HEADER_AGENT)
    return None if name is None else unquote(name)
