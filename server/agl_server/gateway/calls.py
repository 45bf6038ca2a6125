"""The gateway between agents and the model server: the only source of recorded tokens.

Each call is attributed to an attempt, sampled by its mode, forwarded, recorded, and only then answered. Dialects hold
the differences between APIs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from hashlib import blake2b
from typing import Any
from urllib.parse import unquote

import orjson
from msgspec import Struct, structs
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from agl_core.apis.answered import NOT_KEPT, Budget, ClientExchange, retry_count
from agl_core.apis.dialect import Dialect, ModelRequest, unsupported
from agl_core.apis.errors import ApiError, as_answer, attempt_closed, stopping, store_failed
from agl_core.apis.reply import Reply, read_reply
from agl_core.apis.streamed import Delta, StreamedCompletion
from agl_core.apis.streams import STREAM_HEADERS, STREAM_TYPE, Event, Renderer
from agl_core.capture import unpack_variables
from agl_core.capture.requests import (
    HEADER_AGENT,
    HEADER_CALL,
    HEADER_IGNORED,
    HEADER_PARENT_SPAN,
    HEADER_ROLLOUT,
    HEADER_STATE,
)
from agl_core.config.models import PromptSection, SamplingSection
from agl_core.config.sections import is_among, policy_of
from agl_core.errors import StoreError, StoreRefusedError, nearest
from agl_core.store import Store
from agl_core.types import Call, Mode, Rollout, Sampling
from agl_server.gateway.attempts import ActiveAttempt, Attribution, Destination, Relay
from agl_server.gateway.programs import Marks, marks_of
from agl_server.gateway.upstream import HttpReply, forwarded
from agl_server.http.listening import CONNECTION, HttpConnection, error_response, json_response, read_body

logger = logging.getLogger(__name__)

_MAX_NOTES = 100
"""Distinct notes logged."""


class _ModelCall(Struct, frozen=True, eq=False):
    """A request of an agent, with its attempt and API."""

    attempt: ActiveAttempt
    dialect: Dialect
    request: ModelRequest
    headers: Headers
    marks: Marks
    id: str
    """Recorded, unless the request retries another call."""

    def reply_headers(self, reply_id: str, ignored: str | None) -> dict[str, str]:
        """Headers for the client; `ignored` are fields that the model server ignored."""
        return {HEADER_CALL: reply_id, **self.attempt.reply_headers, **self.request.notes(ignored)}

    def policy(self, served: Destination) -> str:
        """The policy that answers; ApiError 404 if there is none."""
        model, agent, policies = self.request.model, self.marks.agent, served.upstream.models
        policy = policy_of(agent, model, served.settings.agents, policies)
        if policy is not None:
            return policy
        caller = f"the agent {agent!r}" if agent else "a call without an agent's name"
        unknown = f"The model server lists no model {model!r}."
        if served.settings.agents:
            unknown = (
                f"The run trains several policies: none has {caller} among its `agents` ([policies.NAME] agents), and "
                f"none is named {model!r} or 'default'."
            )
        raise ApiError(404, f"{unknown} {nearest(model, policies)}", param="model", code="model_not_found")


def _response(dialect: Dialect, request: ModelRequest, reply: Reply) -> Response:
    """A whole reply, streamed if the client asked for that."""
    if request.stream and not dialect.counts:
        stream = dialect.renderer(request, reply.id).stream(reply)
        return Response(stream, media_type=STREAM_TYPE, headers=STREAM_HEADERS)
    return json_response(dialect.whole(request, reply))


class Gateway:
    """Answers agents' model calls by the attempt's own relay, or by `relay`."""

    def __init__(
        self, attribution: Attribution, store: Store, relay: Relay, prompts: Mapping[str, PromptSection]
    ) -> None:
        self.attribution = attribution
        self._store, self._relay, self._prompts = store, relay, prompts
        self._budget = Budget()
        self._noted: set[str] = set()
        self._in_flight: dict[asyncio.Future[Reply], asyncio.Task[Any]] = {}
        """By call: the request that makes it."""

    def current_destination(self, attempt: ActiveAttempt) -> Destination:
        """The destination of an attempt's calls; ApiError 503 if there is none."""
        return self._relay_of(attempt).current_destination()

    def _relay_of(self, attempt: ActiveAttempt) -> Relay:
        return attempt.answered_by or self._relay

    async def answer(self, request: Request, send: Send, dialect: Dialect) -> None:
        """Answer one model call, and record whether the reply arrived."""
        attempt: ActiveAttempt | None = None
        exchange: ClientExchange | None = None
        response: Response
        last_events = b""
        connection: HttpConnection = request.scope[CONNECTION]
        live = LiveReply(connection, send)
        try:
            attempt = await self.attribution.open(request)
            sent = attempt.answered.sent
            raw = await read_body(request, attempt=attempt.key, count_values=sent.count_values)
            await self._others_first()
            parsed = dialect.parse(raw, attempt.answered)
            await self._others_first()
            if not parsed.model:
                served = self.current_destination(attempt).upstream.models
                parsed = parsed.named(request.path_params.get("deployment"), served)
            marks = marks_of(parsed.recorded, request.headers)
            if (name := request.headers.get(HEADER_AGENT)) is not None:
                marks = Marks(marks.program, agent=unquote(name))
            if texts := replaced_prompts(self._prompts, attempt.rollout, marks.agent):
                parsed = parsed.with_system_texts(texts)
            call = _ModelCall(attempt, dialect, parsed, request.headers, marks, attempt.call_id(dialect.id_prefix))
            if dialect.counts:
                response = _response(dialect, parsed, await self._counted(call))
            else:
                exchange = self._exchange(call, raw)
                exchange.waiting.append(connection)
                reply = await self._reply(call, exchange, live)
                if dialect.echoes:
                    attempt.answered.remember(exchange, reply, parsed.conversation, len(raw))
                exchange.request = parsed if exchange.conversation is not None else None
                self._budget.update(attempt.answered)
                self._log(dialect, parsed.notes(reply.raw.ignored))
                if live.has_begun:
                    last_events = live.renderer.encode(live.renderer.finish(reply)) + live.renderer.done
                else:
                    response = _response(dialect, parsed, reply)
                    headers = call.reply_headers(reply.id, reply.raw.ignored)
                    response.raw_headers += [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
        except Exception as error:
            failure, exchange = as_answer(error, request.url.path), None
            if attempt is not None:
                attempt.count_failure(failure)
            if live.has_begun:
                last_events = live.renderer.encode([live.renderer.fail(failure)])
            response = error_response(failure, dialect.problem(failure))
        reachable = not connection.is_gone
        if live.has_begun:
            await send({"type": "http.response.body", "body": last_events, "more_body": False})
        elif reachable:
            connection.reply(response, send)
        arrived = reachable and await connection.has_left()
        if attempt is not None and exchange is not None:
            await self._delivered(attempt, exchange, arrived)

    async def kept(self, request: Request, dialect: Dialect, reply_id: str) -> Response:
        """Repeat a kept response (GET), or remove it (DELETE); echoes of it are still recognised."""
        try:
            exchange = (await self.attribution.open(request)).answered.of_reply(reply_id)
            if exchange is None or exchange.kept is None or exchange.request is None:
                raise ApiError(404, f"Response with id {reply_id!r} not found. {NOT_KEPT}", code="response_not_found")
            if request.method == "DELETE":
                exchange.conversation = exchange.request = None
                return json_response({"id": reply_id, "object": "response", "deleted": True})
            for name in ("include", "include[]", "starting_after"):
                if name in request.query_params:
                    raise unsupported(name, "is not served where a response is fetched")
            stream = request.query_params.get("stream") == "true"
            return _response(dialect, structs.replace(exchange.request, stream=stream), exchange.kept.read())
        except Exception as error:
            failure = as_answer(error, request.url.path)
            return error_response(failure, dialect.problem(failure))

    def _log(self, dialect: Dialect, notes: Mapping[str, str]) -> None:
        """Log once each field that was ignored."""
        for ignored in notes.values():
            note = f"{dialect.api}: {ignored}"
            if note not in self._noted and len(self._noted) < _MAX_NOTES:
                self._noted.add(note)
                logger.warning("Ignored in requests of %s.", note)

    async def stop(self) -> None:
        for request in self._in_flight.values():
            request.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)

    async def _counted(self, call: _ModelCall) -> Reply:
        """A reply that tells the prompt's length; it is not recorded."""
        call.attempt.passed_through[call.dialect.api] += 1
        with self._relay_of(call.attempt).acquire_destination(call.attempt.rollout.group) as served:
            request = call.request
            body = forwarded(served.upstream, request.chat, request.requested, call.policy(served), trains=False)
            body.pop("return_token_ids", None)  # agl's chat layer remembers no reply without them.
            answer = await served.client.complete(body, call.attempt.key)
            return read_reply(answer.body, answer.headers, "", logprobs=False)

    def _exchange(self, call: _ModelCall, raw: bytes) -> ClientExchange:
        """The exchange of the call that this request retries, or a new one."""
        attempt, api, count = call.attempt, call.dialect.api, retry_count(call.headers)
        digest = hash((api, raw))  # 64 bits, keyed: enough for the requests of one attempt.
        exchange = attempt.answered.retried(digest, count)
        if exchange is None:
            earlier = attempt.answered.unanswered(api, call.request.recorded) if count else None
            sequence = attempt.next_sequence() if earlier is None else earlier.sequence
            exchange = attempt.answered.open(digest, count, sequence)
            exchange.supersedes = earlier
        return exchange

    async def _reply(self, call: _ModelCall, exchange: ClientExchange, live: LiveReply) -> Reply:
        """Make the call, or join the one that this request retries. Hanging up ends it once the reply has begun."""
        if exchange.kept is not None:
            return exchange.kept.read()
        if exchange.reply is not None:
            return await asyncio.shield(exchange.reply)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        exchange.reply = future
        self._in_flight[future] = _this_task()
        try:
            reply = await self._make(call, exchange, future, live)
            exchange.kept = None if live.was_left else reply.raw
            future.set_result(reply)
        except asyncio.CancelledError:
            future.set_exception(stopping())
        except Exception as error:
            future.set_exception(error)
        del self._in_flight[future]
        call.attempt.answered.end(exchange)
        return future.result()

    async def _make(
        self, call: _ModelCall, exchange: ClientExchange, done: asyncio.Future[Reply], live: LiveReply
    ) -> Reply:
        attempt, request, headers = call.attempt, call.request, call.headers
        with self._relay_of(attempt).acquire_destination(attempt.rollout.group) as served:
            started = time.time()
            policy = call.policy(served)
            version = served.versions.get(policy)  # The one at the call's start, if the upstream names none.
            seed = call_seed(served.settings.seed, attempt.rollout, attempt.record.attempt, exchange.sequence)
            effective = effective_sampling(attempt.rollout, request.requested, served.settings.sampling, seed)
            body = forwarded(served.upstream, request.chat, effective, policy, trains=attempt.mode.trains)
            attempt.asking[exchange.sequence] = started
            try:
                if request.stream and served.upstream.streams:
                    body |= {"stream": True, "stream_options": {"include_usage": True}}
                answer = await served.client.complete(body, attempt.key, streamed="stream" in body)
                await self._others_first()
                reply = await live.follow(answer, call, exchange.waiting)
                await self._others_first()
            finally:
                attempt.asking.pop(exchange.sequence, None)
                attempt.last_answer = time.time()
            late = attempt.closed
            record = Call(
                id=reply.id,
                rollout=attempt.record.rollout,
                attempt=attempt.record.attempt,
                sequence=exchange.sequence,
                policy=policy,
                version=version if reply.version is None else reply.version,
                request=request.recorded,
                choices=reply.choices,
                started=started,
                ended=time.time(),
                api=call.dialect.api,
                **call.marks._asdict(),
                parent_span=headers.get(HEADER_PARENT_SPAN),
                state=unpack_variables(headers.get(HEADER_STATE)),
                prompt_ids=reply.prompt_ids,
                requested=request.requested,
                effective=effective,
                prefix_broken=reply.prefix_broken,
                prefilled=reply.prefilled,
                reused=reply.reused,
                late=late,
                undelivered=all(connection.is_gone for connection in exchange.waiting),
                stamped=HEADER_ROLLOUT in headers,
                ignored=request.notes(reply.raw.ignored).get(HEADER_IGNORED),
            )
            await self._commit(attempt, record, exchange.supersedes, done)
            attempt.completed_calls += not late
            exchange.call = None if late else record
            if live.was_left:  # A retry replaces it.
                exchange.supersedes = exchange.call
            if late and attempt.refuses_late:
                raise attempt_closed(*attempt.key)
            return reply

    async def _others_first(self) -> None:
        """Let other calls come as far as this one: the same step for all in turn stays in the processor's cache."""
        if len(self._in_flight) > 1:
            await asyncio.sleep(0)

    async def _delivered(self, attempt: ActiveAttempt, exchange: ClientExchange, arrived: bool) -> None:
        """Correct the record of whether a reply arrived; its retry may arrive later."""
        call = exchange.call
        if call is not None:
            exchange.arrived |= arrived
            if call.undelivered is exchange.arrived and not attempt.closed:
                call = exchange.call = replace(call, undelivered=not exchange.arrived)
                with contextlib.suppress(ApiError):  # Logged, and no client waits.
                    await self._commit(attempt, call, None, _this_task())
            if exchange.arrived:
                exchange.call = None
                exchange.waiting.clear()
        await attempt.delivered(arrived)

    async def _commit(
        self, attempt: ActiveAttempt, call: Call, superseded: Call | None, done: asyncio.Future[Any]
    ) -> None:
        """Write the call, and that a `superseded` one counts no more; closing its attempt waits until it is `done`."""
        attempt.committing.add(done)
        try:
            counts_no_more = () if call.late or superseded is None else (replace(superseded, late=True),)
            await attempt.keep(self._store, call, *counts_no_more)
        except StoreRefusedError:
            raise
        except StoreError as failed:
            logger.error("A call of attempt %s/%s is not recorded, nor answered: %s", *attempt.key, failed)
            raise store_failed() from failed
        finally:
            attempt.committing.discard(done)


class LiveReply:
    """The reply to one request. A stream begins with the model's first chunk: until then errors have a status.

    A client that leaves later ends the sampling; one that leaves before may ask again for the same reply.
    """

    renderer: Renderer

    def __init__(self, connection: HttpConnection, send: Send) -> None:
        self.has_begun = False
        self.was_left = False
        """Its clients left before its end, and so it was cut."""
        self._connection, self._send = connection, send

    async def follow(self, answer: HttpReply, call: _ModelCall, waiting: Sequence[HttpConnection]) -> Reply:
        """Pass a streamed reply on, all but its end, and return all of it. ApiError if it breaks off.

        `waiting` are the connections of all who asked for it.
        """
        if answer.parts is None:
            earlier, logprobs = call.attempt.answered.prompt_ids, call.request.logprobs
            return read_reply(answer.body, answer.headers, call.id, logprobs=logprobs, earlier=earlier)
        self.renderer = call.dialect.renderer(call.request, call.id)
        headers = call.reply_headers(call.id, answer.headers.get(HEADER_IGNORED))
        completion = StreamedCompletion(call.id)
        async with aclosing(answer.parts):
            async for chunks in answer.parts:
                deltas = [delta for chunk in chunks for delta in completion.add(chunk)]
                await self._pass_on(deltas, completion, headers)
                if self.has_begun and all(connection.is_gone for connection in waiting):
                    self.was_left = True
                    break
        await self._pass_on(completion.end(), completion, headers)
        return read_reply(completion.whole(), answer.headers, call.id, logprobs=call.request.logprobs)

    async def _pass_on(
        self, deltas: Sequence[Delta], completion: StreamedCompletion, headers: Mapping[str, str]
    ) -> None:
        if not deltas or self._connection.is_gone:
            return
        events = list[Event]()
        if not self.has_begun:
            self.has_begun = True
            own = {"content-type": STREAM_TYPE, **STREAM_HEADERS, **headers}
            raw = [(name.encode(), value.encode("latin-1")) for name, value in own.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})
            events += self.renderer.start(completion.head)
        for delta in deltas:
            events += self.renderer.feed(delta)
        if events:
            await self._send({"type": "http.response.body", "body": self.renderer.encode(events), "more_body": True})


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def effective_sampling(rollout: Rollout, requested: Sampling, settings: SamplingSection | None, seed: int) -> Sampling:
    """Temperature and top_p by the rollout's mode, this call's seed, and the smaller of both token limits."""
    if settings is None:  # Calls are only recorded.
        return requested
    if rollout.mode is Mode.USE:
        return Sampling(
            temperature=settings.temperature if requested.temperature is None else requested.temperature,
            top_p=1.0 if requested.top_p is None else requested.top_p,
            max_tokens=settings.max_tokens if requested.max_tokens is None else requested.max_tokens,
            seed=requested.seed,
        )
    temperature = 0.0 if rollout.mode is Mode.EVAL_GREEDY else settings.temperature
    limit = settings.max_tokens if requested.max_tokens is None else min(requested.max_tokens, settings.max_tokens)
    return Sampling(temperature=temperature, top_p=1.0, max_tokens=limit, seed=seed)


def replaced_prompts(prompts: Mapping[str, PromptSection], rollout: Rollout, agent: str | None) -> dict[str, str]:
    """For an agent: text in its system messages → the named prompt that replaces it."""
    return {
        prompt.replace: text
        for name, prompt in prompts.items()
        if prompt.replace is not None and is_among(agent, prompt.agents)
        if (text := rollout.prompts.get(name, prompt.text)) is not None
    }


def call_seed(run_seed: int, rollout: Rollout, attempt: int, sequence: int) -> int:
    """A 63-bit sampling seed: the same for the same call of a repeated run, different for every other call.

    It depends on the group's position, as a step may draw a task twice, and not on its name, which a resume changes.
    """
    position = [rollout.mode, rollout.step, rollout.position, rollout.task.id, rollout.member, attempt, sequence]
    return int.from_bytes(blake2b(orjson.dumps([run_seed, *position]), digest_size=8).digest(), "big") >> 1
