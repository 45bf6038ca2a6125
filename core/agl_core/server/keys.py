"""Attempts as queue and gateway share them, and whose request it is: the keys of operators, workers and agents.

operator  see what rollouts wait for, and view the run from another machine
worker    lease rollouts
lease     heartbeats and the end of one attempt: for the worker that leased it, and never in an environment
agent     the calls and spans of one attempt

Keys of leases, agents and sources are derived from the server's secret: none is kept, and all survive a restart.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import ipaddress
import os
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.routing import Route

from agl_core.apis.answered import ReplyCache
from agl_core.apis.errors import ApiError, attempt_closed
from agl_core.capture.requests import HEADER_ROLLOUT
from agl_core.errors import ServerError
from agl_core.server.upstream import Relay
from agl_core.store.interface import Record, Store
from agl_core.types import Attempt, AttemptKey, Call, Ending, Mode, Reward, Rollout, Source
from agl_core.wire import (
    OPERATOR_KEY,
    WORKER_KEY,
    CloseRequest,
    Right,
    ServerFile,
    problem_of_key,
    take_keys,
)

_TRIED_AGAIN = frozenset({Ending.CRASHED, Ending.TIMED_OUT})
_NO_CALL = (
    "The agent finished without one LLM call through agl, so there is nothing to learn from. Its LLM client does "
    "not use agl's base URL: let it read OPENAI_BASE_URL or ANTHROPIC_BASE_URL (do not set base_url in code), or pass "
    "it `context.base_url` and `context.api_key`."
)
_INTERRUPTED = "The server, its store, or the model behind it was away while the agent ran, which may be why it failed:"
_NOT_AWAITED = "The agent finished before its first LLM call did: let it wait for the reply."
_AGENT_HINT = (
    "Each attempt has a key of its own, which is good for that attempt only. An agent in a process of its own has it "
    "in OPENAI_API_KEY and ANTHROPIC_API_KEY. Where agents share a process, agl sets it on each request of httpx; "
    "give other clients, and processes that the agent starts, context.base_url and context.api_key."
)


@dataclass(slots=True, eq=False)
class ActiveAttempt:
    """An attempt that a worker holds; it stays known for a while after its end."""

    rollout: Rollout
    record: Attempt
    closed: bool = False
    """It has ended, or its end is being written: calls no longer count."""
    started_calls: int = 0
    completed_calls: int = 0
    """Calls recorded while it was open."""
    asking: dict[int, float] = field(default_factory=dict)
    """By sequence: when each call began that waits for the model's reply."""
    last_answer: float | None = None
    interrupted: bool = False
    """The server had no model for it, or could not record, which may break its agent."""
    gone_after: int | None = None
    """Completed calls when the model server last failed, or was gone."""
    passed_through: Counter[str] = field(default_factory=Counter)
    """By route: requests passed on and not recorded."""
    context_overflows: int = 0
    last_failure: str | None = None
    answered: ReplyCache = field(default_factory=ReplyCache)
    committing: set[asyncio.Future[Any]] = field(default_factory=set)
    """Calls being written; the end waits for them, so that the store has them first."""
    closing: asyncio.Task[None] | None = None
    reported: Ending | None = None
    """The ending that its worker reported."""
    answered_by: Relay | None = None
    """None: the run's relay."""
    reply_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> AttemptKey:
        return self.record.key

    @property
    def mode(self) -> Mode:
        return self.rollout.mode

    def next_sequence(self) -> int:
        """Count a call that begins, and return its place."""
        self.started_calls += 1
        return self.started_calls - 1

    @property
    def refuses_late(self) -> bool:
        """True if its calls are refused once it is closed; sessions refuse none."""
        return self.mode is not Mode.USE

    def call_id(self, prefix: str) -> str:
        """The id of a new call; `prefix` is its API's."""
        return f"{prefix}{os.urandom(16).hex()}"

    async def keep(self, store: Store, *calls: Call) -> None:
        """Record calls, all or none; StoreError."""
        await store.put(*calls)

    async def delivered(self, arrived: bool) -> None:
        """Hook: called after each reply, with whether it reached the client."""

    def forget(self) -> None:
        """Free the memory of an attempt whose end is recorded; who it was and how it ended stays."""
        self.answered.clear()
        self.last_failure = None
        self.rollout = replace(self.rollout, task=replace(self.rollout.task, input=None, metadata={}), prompts={})
        self.record = replace(self.record, result=None, error=None, passed_through=None, bypassed=None)

    def count_failure(self, error: ApiError) -> None:
        """Note an error that the agent got instead of a reply."""
        self.last_failure = error.message
        self.context_overflows += error.is_context_overflow
        self.interrupted |= error.status == 503
        if error.status >= 500:
            self.gone_after = self.completed_calls


def attempt_key(rollout: str, number: str) -> AttemptKey | None:
    """The attempt that a path or header names; None if malformed.

    >>> attempt_key("r", "0"), attempt_key("r", "-1")
    (AttemptKey(rollout='r', attempt=0), None)
    """
    is_number = number.isascii() and number.isdecimal() and len(number) < 10
    return AttemptKey(rollout, int(number)) if rollout and is_number else None


def decided(attempt: ActiveAttempt, request: CloseRequest) -> tuple[Ending, str | None]:
    """The ending and error to record, by the worker's report and the gateway's own observations."""
    ending, error = request.ending, request.error
    was_gone = attempt.gone_after == attempt.completed_calls  # A call that was answered since did not break the agent.
    is_cut = was_gone and attempt.completed_calls > 0  # It caught the error, and ended without the policy's word.
    if (ending is Ending.FINISHED and is_cut) or (ending in _TRIED_AGAIN and (attempt.interrupted or was_gone)):
        return Ending.LOST, f"{_INTERRUPTED} {error or attempt.last_failure or ''}".rstrip()
    if ending is Ending.CRASHED and attempt.context_overflows:
        return Ending.CONTEXT_OVERFLOW, error
    if ending is not Ending.FINISHED or attempt.completed_calls:
        return ending, error
    if attempt.context_overflows:
        return Ending.CONTEXT_OVERFLOW, error or attempt.last_failure
    if attempt.last_failure:
        return Ending.NO_CALL, f"None of the agent's LLM calls got a reply. The last error was: {attempt.last_failure}"
    if attempt.started_calls:
        return Ending.NO_CALL, _NOT_AWAITED
    return Ending.NO_CALL, _NO_CALL + (f" It called {', '.join(request.bypassed)}." if request.bypassed else "")


def is_tried_again(attempt: ActiveAttempt, ending: Ending, budget: int) -> bool:
    """True if the rollout gets another of its `budget` attempts: this one was lost, or broke before the policy acted.

    An attempt in which the policy acted is data.
    """
    if attempt.record.attempt + 1 >= budget:
        return False
    return ending is Ending.LOST or (ending in _TRIED_AGAIN and attempt.completed_calls == 0)


def reported(key: AttemptKey, request: CloseRequest) -> list[Record]:
    """The agent side's report as records; rewards of one name add up."""
    tool_results = [
        # The agent's side has two sources, whatever it claims.
        replace(report, **key._asdict(), source=Source.COMMAND if report.source is Source.COMMAND else Source.ADAPTER)
        for report in request.tool_results
    ]
    totals: dict[str, float] = {}
    for reward in request.rewards:
        totals[reward.name] = totals.get(reward.name, 0.0) + reward.value
    rewards = [Reward(*key, name=name, value=total, source="agent") for name, total in totals.items()]
    return [*tool_results, *rewards]


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one server: compared in constant time, never logged or stored with the run.

    `secret` derives the keys of leases and agents; `chosen` names the variables by which the user set keys.
    """

    worker: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    operator: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    chosen: frozenset[str] = frozenset()
    passthrough: str | None = field(default=None, repr=False)
    """The server's own key for requests that it passes through."""

    @classmethod
    def of_run(cls, file: Path) -> Keys:
        """Take the keys out of AGL_WORKER_KEY and AGL_OPERATOR_KEY, else read `file`, else make new ones.

        ServerError if a key is invalid, or both are the same.
        """
        fresh, before, chosen = cls(), ServerFile.read(file), take_keys()
        for name, key in chosen.items():
            if problem := problem_of_key(name, key):
                raise ServerError(problem)
        keys = cls(
            worker=chosen.get(WORKER_KEY) or (before and before.worker_key) or fresh.worker,
            operator=chosen.get(OPERATOR_KEY) or (before and before.operator_key) or fresh.operator,
            secret=before.agent_secret if before else fresh.secret,
            chosen=frozenset(chosen),
        )
        if keys.worker == keys.operator:
            raise ServerError(f"{WORKER_KEY} and {OPERATOR_KEY} are the same, but open different doors: set two.")
        return keys

    def write(self, file: Path, base_url: str, *, begun: bool = False, over: bool = False) -> None:
        """Write a `ServerFile`; keys that the user chose are left out."""
        ServerFile(
            base_url=base_url,
            worker_key=None if WORKER_KEY in self.chosen else self.worker,
            operator_key=None if OPERATOR_KEY in self.chosen else self.operator,
            agent_secret=self.secret,
            begun=begun,
            over=over,
        ).write(file)

    def of_attempt(self, attempt: AttemptKey) -> str:
        """The agent's key of one attempt."""
        return self.derive(f"agent/{attempt.rollout}/{attempt.attempt}")

    def of_lease(self, attempt: AttemptKey) -> str:
        """The secret of one attempt's lease."""
        return self.derive(f"lease/{attempt.rollout}/{attempt.attempt}")

    def check_host(self, host: str) -> None:
        """ServerError if other machines can reach `host` and the user chose no worker key."""
        if WORKER_KEY not in self.chosen and not is_loopback(host):
            raise ServerError(
                f"The Lightning Server does not listen on {host}, where other machines can reach it, without a key of "
                f"your choice. Set {WORKER_KEY} here and where workers run (`openssl rand -hex 24` makes one), or use "
                f"host 127.0.0.1."
            )

    def check(self, request: Request, right: Right) -> None:
        """ApiError 401 unless the request carries a key of this right."""
        keys = {
            Right.WORKER: [self.worker],
            Right.OPERATOR: [self.operator],
            Right.EITHER: [self.operator, self.worker],
        }[right]
        if not any(carries(request, key) for key in keys):
            raise refused_key(request, f"This route takes the key of: {right}.")

    def holder(self, request: Request, attempts: Iterable[AttemptKey]) -> AttemptKey:
        """The one of `attempts` whose agent's key the request carries; ApiError 401 if none."""
        for attempt in attempts:
            if carries(request, self.of_attempt(attempt)):
                return attempt
        raise refused_key(request, _AGENT_HINT)

    def derive(self, purpose: str) -> str:
        """The key for this purpose: always the same, and not to be told from other keys."""
        return _made(self.secret, purpose)


@lru_cache(4096)
def _made(secret: str, name: str) -> str:
    digest = hmac.digest(secret.encode(), name.encode(), "sha256")
    return f"agl-{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def _sent(request: Request) -> list[str]:
    """The bearer token, `x-api-key` (many of Anthropic's clients) and `api-key` (Azure's)."""
    headers = request.headers
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return [key for key in (bearer, headers.get("x-api-key"), headers.get("api-key")) if key]


def carries(request: Request, key: str) -> bool:
    return any(equal_secrets(sent, key) for sent in _sent(request))


def equal_secrets(sent: str, key: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(sent.encode(errors="surrogatepass"), key.encode())


def refused_key(request: Request, hint: str) -> ApiError:
    """The 401 for a missing or wrong key."""
    fault = "is not the right one" if request.headers.get("authorization") or any(_sent(request)) else "is missing"
    return ApiError(401, f"The API key (Authorization: Bearer …, or x-api-key) {fault}. {hint}", code="invalid_api_key")


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class RolloutSource:
    """Opens rollouts of mode `use` beside the queue's; this base opens none. Used on the server's event loop.

    Each rollout has one `ActiveAttempt`, which says what answers its calls and how they are recorded.
    """

    @property
    def routes(self) -> Sequence[Route]:
        return ()

    @property
    def counters(self) -> Mapping[str, int]:
        """Its part of the server's `Activity`."""
        return {}

    async def start(self, base_url: str) -> None:
        """Called before the server listens."""
        return

    async def stop(self) -> None:
        """Called after the server has stopped listening."""
        return

    async def attempt_of(self, request: Request) -> ActiveAttempt | None:
        """The attempt of a model call, open or not; None if the call is not its own. ApiError to refuse it."""
        return None


SourceFactory: TypeAlias = Callable[[Store, Keys], Awaitable[RolloutSource]]


class Attribution:
    """Finds the attempt that a model call or span belongs to: one of the queue or, for calls, of the source."""

    def __init__(
        self,
        keys: Keys,
        known: Mapping[AttemptKey, ActiveAttempt],
        running: Mapping[AttemptKey, ActiveAttempt],
        source: RolloutSource,
    ) -> None:
        self._keys, self._known, self._running, self._source = keys, known, running, source

    async def of(self, request: Request) -> ActiveAttempt:
        """The attempt of a request, open or not, by its key, and by its path or a header if they name one.

        ApiError 401 without that attempt's key, then 400 if path and header differ, 404 if there is no such attempt;
        or the source's.
        """
        opened = await self._source.attempt_of(request)
        return self.leased(request) if opened is None else opened

    async def open(self, request: Request) -> ActiveAttempt:
        """The same; ApiError 410 if it is closed and refuses late calls."""
        attempt = await self.of(request)
        if attempt.closed and attempt.refuses_late:
            raise attempt_closed(*attempt.key)
        return attempt

    def leased(self, request: Request) -> ActiveAttempt:
        """The same, among the queue's attempts."""
        path, header = request.path_params, request.headers.get(HEADER_ROLLOUT)
        in_path = f"{path['rollout']}/{path['attempt']}" if "rollout" in path else None
        name = header if in_path is None else in_path
        if name is None:
            key = self._keys.holder(request, self._running)
        else:
            rollout, _, number = name.rpartition("/")
            named = attempt_key(rollout, number)
            key = self._keys.holder(request, [] if named is None else [named])
        if header not in (None, name):
            raise ApiError(
                400,
                f"The path says {in_path}, but the header {HEADER_ROLLOUT} says {header!r}. Send one of them, or the "
                f"same in both.",
                code="rollout_mismatch",
            )
        attempt = self._known.get(key)
        if attempt is None:
            raise ApiError(
                404,
                f"There is no attempt {key.attempt} of rollout {key.rollout!r} on this server. A request needs the "
                f"rollout and attempt of a lease that is held now; an old base URL does not do.",
                code="rollout_unknown",
            )
        return attempt
