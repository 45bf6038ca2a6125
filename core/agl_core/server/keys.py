"""Whose request is it: the keys of operators, workers and agents, and the attempt that a call belongs to.

operator  see what rollouts wait for, and view the run from another machine
worker    lease rollouts
lease     heartbeats and the end of one attempt: for the worker that leased it, and never in an environment
agent     the calls and spans of one attempt

Those from `lease` on are made from the server's secret and what they are for, as are those of a source of rollouts
(`derive`). So none has to be kept, and all survive a restart.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from starlette.requests import Request
from starlette.routing import Route

from agl_core.errors import ServerError
from agl_core.server.attempt import ActiveAttempt, attempt_key
from agl_core.server.errors import ApiError, attempt_closed
from agl_core.store.interface import Store
from agl_core.types import AttemptKey
from agl_core.wire.headers import HEADER_ROLLOUT
from agl_core.wire.keys import OPERATOR_KEY, WORKER_KEY, ServerFile, problem_of_key, take_keys
from agl_core.wire.workers import AnyOperation, Right

if TYPE_CHECKING:
    from agl_core.server.queue import RolloutQueue

_AGENT_HINT = (
    "Each attempt has a key of its own, which is good for that attempt only. An agent in a process of its own has it "
    "in OPENAI_API_KEY and ANTHROPIC_API_KEY. Where agents share a process, agl sets it on each request of httpx; "
    "give other clients, and processes that the agent starts, context.base_url and context.api_key."
)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one server. They are compared in constant time, and neither logged nor stored with the run.

    The keys of leases and agents are made of `secret`; `chosen` has the names of the variables by which the user set
    keys.
    """

    worker: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    operator: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    chosen: frozenset[str] = frozenset()
    passthrough: str | None = field(default=None, repr=False)
    """What the server sends with requests that it passes through."""

    @classmethod
    def of_run(cls, file: Path) -> Keys:
        """The keys of a run: from AGL_WORKER_KEY and AGL_OPERATOR_KEY, else from `file`, else new ones.

        These variables leave the environment. ServerError if one is invalid, or both are the same.
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
        """Keep them in `file`, for its owner's eyes only; a key that the user chose is not written down.

        `begun` says that the store knows of the run, `over` that the run has made its last step.
        """
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
        """The secret of the lease of one attempt."""
        return self.derive(f"lease/{attempt.rollout}/{attempt.attempt}")

    def check_host(self, host: str) -> None:
        """ServerError if others can reach `host`, and the user did not choose the workers' key."""
        if WORKER_KEY not in self.chosen and not is_loopback(host):
            raise ServerError(
                f"The Lightning Server does not listen on {host}, where other machines can reach it, without a key of "
                f"your choice. Set {WORKER_KEY} here and where workers run (`openssl rand -hex 24` makes one), or use "
                f"host 127.0.0.1."
            )

    def check(self, request: Request, right: Right, attempt: AttemptKey | None = None) -> None:
        """ApiError 401 unless the request carries a key of this right; `attempt` is the one that its path names."""
        keys = {
            Right.WORKER: [self.worker],
            Right.OPERATOR: [self.operator],
            Right.EITHER: [self.operator, self.worker],
            Right.LEASE: [] if attempt is None else [self.of_lease(attempt)],
        }[right]
        if not any(carries(request, key) for key in keys):
            raise refused_key(request, f"This route takes the key of: {right}.")

    def holds(self, secret: str, attempt: AttemptKey) -> bool:
        """Whether this is the secret of the attempt's lease."""
        return _same(secret, self.of_lease(attempt))

    def holder(self, request: Request, attempts: Iterable[AttemptKey]) -> AttemptKey:
        """The attempt whose agent's key the request carries; ApiError 401 if it is none of these."""
        for attempt in attempts:
            if carries(request, self.of_attempt(attempt)):
                return attempt
        raise refused_key(request, _AGENT_HINT)

    def derive(self, purpose: str) -> str:
        """The key for this purpose: always the same, and no other key says what it is."""
        return _made(self.secret, purpose)


@lru_cache(4096)
def _made(secret: str, name: str) -> str:
    digest = hmac.digest(secret.encode(), name.encode(), "sha256")
    return f"agl-{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def _sent(request: Request) -> list[str]:
    """The bearer token, `x-api-key` (many of Anthropic's clients) and `api-key` (Azure's); one of them is enough."""
    headers = request.headers
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return [key for key in (bearer, headers.get("x-api-key"), headers.get("api-key")) if key]


def carries(request: Request, key: str) -> bool:
    return any(_same(sent, key) for sent in _sent(request))


def _same(sent: str, key: str) -> bool:
    return hmac.compare_digest(sent.encode(errors="surrogatepass"), key.encode())


def refused_key(request: Request, hint: str) -> ApiError:
    """The answer to a request without the right key."""
    found = "is not the right one" if request.headers.get("authorization") or any(_sent(request)) else "is missing"
    return ApiError(401, f"The API key (Authorization: Bearer …, or x-api-key) {found}. {hint}", code="invalid_api_key")


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class RolloutSource(Protocol):
    """Opens rollouts of mode `use` beside those of the queue. All methods belong to the server's event loop.

    Each rollout has one attempt, whose `ActiveAttempt` says what answers its calls and how they are recorded.
    """

    @property
    def operations(self) -> Sequence[AnyOperation]:
        """What its routes answer, for the OpenAPI document and the limits of bodies."""

    @property
    def routes(self) -> Sequence[Route]:
        """Further routes of the server."""

    @property
    def counters(self) -> Mapping[str, int]:
        """What the server's health shows of it."""

    async def start(self, base_url: str) -> None:
        """Called when the server has its port, before it listens."""

    async def stop(self) -> None:
        """Called when the server listens no more."""

    async def attempt_of(self, request: Request) -> ActiveAttempt | None:
        """The attempt that a model call belongs to, open or not; None: to none of its. ApiError if it is refused."""


SourceFactory: TypeAlias = Callable[[Store, Keys], Awaitable[RolloutSource]]
"""Makes the source of a run's server; ConfigError if its store does not do."""


class Attribution:
    """Whose model calls and spans are whose: of running attempts, and calls also of those that a source opens."""

    def __init__(self, keys: Keys, queue: RolloutQueue, source: RolloutSource | None) -> None:
        self._keys, self._queue, self._source = keys, queue, source

    async def of(self, request: Request) -> ActiveAttempt:
        """The attempt that a request belongs to, open or not: its key says so, and its path or a header may.

        ApiError 401 without that attempt's key, whatever else is wrong. ApiError 400 if path and header differ, 404
        if there is no such attempt; those of the source.
        """
        opened = None if self._source is None else await self._source.attempt_of(request)
        return self.leased(request) if opened is None else opened

    async def open(self, request: Request) -> ActiveAttempt:
        """The same; ApiError 410 if it is closed and takes no calls then."""
        attempt = await self.of(request)
        if attempt.closed and attempt.refuses_late:
            raise attempt_closed(*attempt.key)
        return attempt

    def leased(self, request: Request) -> ActiveAttempt:
        """The same, of the attempts of the queue alone."""
        path, header = request.path_params, request.headers.get(HEADER_ROLLOUT)
        in_path = f"{path['rollout']}/{path['attempt']}" if "rollout" in path else None
        name = header if in_path is None else in_path
        if name is None:
            key = self._keys.holder(request, self._queue.held())
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
        attempt = self._queue.attempt(key)
        if attempt is None:
            raise ApiError(
                404,
                f"There is no attempt {key.attempt} of rollout {key.rollout!r} on this server. A request needs the "
                f"rollout and attempt of a lease that is held now; an old base URL does not do.",
                code="rollout_unknown",
            )
        return attempt
