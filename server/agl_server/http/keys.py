"""Whose request it is: the keys of operators, workers and agents.

operator  see what rollouts wait for, and view the run from another machine
worker    lease rollouts
lease     heartbeats and the end of one attempt: for the worker that leased it, and never in an environment
agent     the calls and spans of one attempt

Keys of leases, agents and sources are derived from the server's secret: none is kept, and all survive a restart.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from starlette.requests import Request

from agl_core.apis.errors import ApiError
from agl_core.errors import ServerError
from agl_core.types import AttemptKey
from agl_core.wire import OPERATOR_KEY, WORKER_KEY, Right, ServerFile, problem_of_key, take_keys

_AGENT_HINT = (
    "Each attempt has a key of its own, which is good for that attempt only. An agent in a process of its own has it "
    "in OPENAI_API_KEY and ANTHROPIC_API_KEY. Where agents share a process, agl sets it on each request of httpx; "
    "give other clients, and processes that the agent starts, context.base_url and context.api_key."
)


def attempt_key(rollout: str, number: str) -> AttemptKey | None:
    """The attempt that a path or header names; None if malformed.

    >>> attempt_key("r", "0"), attempt_key("r", "-1")
    (AttemptKey(rollout='r', attempt=0), None)
    """
    is_number = number.isascii() and number.isdecimal() and len(number) < 10
    return AttemptKey(rollout, int(number)) if rollout and is_number else None


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
        """Take the keys out of AGL_WORKER_KEY and AGL_OPERATOR_KEY, else of `file`, else new ones; ServerError."""
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
        return self.derive(f"agent/{attempt.rollout}/{attempt.attempt}")

    def of_lease(self, attempt: AttemptKey) -> str:
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
        keys = {Right.WORKER: self.worker, Right.OPERATOR: self.operator}
        if not any(carries(request, key) for owner, key in keys.items() if right in (owner, Right.EITHER)):
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
    fault = "is not the right one" if request.headers.get("authorization") or any(_sent(request)) else "is missing"
    return ApiError(401, f"The API key (Authorization: Bearer …, or x-api-key) {fault}. {hint}", code="invalid_api_key")


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
