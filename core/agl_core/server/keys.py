"""API keys: what operators, workers and agents may do, and nothing else.

operator  begin a run, say where its model is served, enqueue, cancel, read and write the store: a trainer apart
worker    lease, heartbeat, close
agent     the calls and spans of one attempt; made from the server's secret, so that none has to be kept
embedded  the calls and spans of every attempt. It stands in the environment of the run's own process only, where
          an agent may have made its LLM client before it had an attempt; workers apart never get it
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import os
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError
from starlette.requests import Request

from agl_core.errors import ServerError
from agl_core.server.faults import ApiError
from agl_core.types import AttemptKey
from agl_core.wire import OPERATOR_KEY, WORKER_KEY, ServerFile
from agl_core.wire.keys import problem_of_key

_AGENT_HINT = (
    "Use the key that agl gives the agent (OPENAI_API_KEY, ANTHROPIC_API_KEY, context.api_key); an attempt's own key "
    "is good for that attempt only."
)
_WORKER_HINT = "These routes take the worker key, not an agent's key."
_OPERATOR_HINT = "These routes take the operator key, not a worker's or an agent's key."


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one server. They are compared in constant time, and neither logged nor stored with the run.

    `worker` and `operator` are the keys of those, `secret` what the agents' keys are made of; `chosen` has the names
    of the variables by which the user set keys.
    """

    worker: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    operator: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    chosen: frozenset[str] = frozenset()

    @classmethod
    def of_run(cls, file: Path) -> Keys:
        """The keys of a run: from AGL_WORKER_KEY and AGL_OPERATOR_KEY, else as `file` has them, else new ones.

        ServerError if one can be no key, or both are the same.
        """
        fresh, before = cls(), _read(file)
        chosen = {name: key for name in (WORKER_KEY, OPERATOR_KEY) if (key := _from_environment(name))}
        keys = cls(
            worker=chosen.get(WORKER_KEY) or (before and before.worker_key) or fresh.worker,
            operator=chosen.get(OPERATOR_KEY) or (before and before.operator_key) or fresh.operator,
            secret=before.agent_secret if before else fresh.secret,
            chosen=frozenset(chosen),
        )
        if keys.worker == keys.operator:
            raise ServerError(f"{WORKER_KEY} and {OPERATOR_KEY} are the same, but open different doors: set two.")
        return keys

    def write(self, file: Path, base_url: str, *, over: bool = False) -> None:
        """Keep them in `file`, for its owner's eyes only; a key that the user chose is not written down.

        `over` says that the run has made its last step.
        """
        content = ServerFile(
            base_url=base_url,
            worker_key=None if WORKER_KEY in self.chosen else self.worker,
            operator_key=None if OPERATOR_KEY in self.chosen else self.operator,
            agent_secret=self.secret,
            over=over,
        )
        new = file.with_suffix(".new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(content.model_dump_json())
        new.replace(file)

    @property
    def embedded(self) -> str:
        return self._made_of("embedded")

    def of_attempt(self, attempt: AttemptKey) -> str:
        """The agent's key of one attempt."""
        return self._made_of(f"{attempt.rollout}/{attempt.attempt}")

    def check_host(self, host: str, needed: Collection[str] = (WORKER_KEY,)) -> None:
        """ServerError if others can reach `host`, and nobody chose the keys that they would need.

        `needed` are the names of their variables.
        """
        missing = [name for name in needed if name not in self.chosen]
        if missing and not is_loopback(host):
            raise ServerError(
                f"The Lightning Server does not listen on {host}, where other machines can reach it, without keys of "
                f"your choice. Set {' and '.join(missing)} here and where they are needed (`openssl rand -hex 24` "
                f"makes one), or use host 127.0.0.1."
            )

    def check_worker(self, request: Request) -> None:
        """ApiError 401 unless the request carries the workers' key."""
        if not _carries(request, self.worker):
            raise _refusal(request, _WORKER_HINT)

    def check_operator(self, request: Request) -> None:
        """ApiError 401 unless the request carries the operator's key."""
        if not _carries(request, self.operator):
            raise _refusal(request, _OPERATOR_HINT)

    def check_worker_or_operator(self, request: Request) -> None:
        """ApiError 401 unless the request carries one of these keys."""
        if not _carries(request, self.operator):
            self.check_worker(request)

    def check_agent(self, request: Request, attempt: AttemptKey | None) -> None:
        """ApiError 401 unless the request carries the key of this attempt, or the embedded one."""
        own = attempt is not None and _carries(request, self.of_attempt(attempt))
        if not own and not _carries(request, self.embedded):
            raise _refusal(request, _AGENT_HINT)

    def holder(self, request: Request, attempts: Iterable[AttemptKey]) -> AttemptKey | None:
        """Which of these attempts the request's key is for; None if it is the embedded one. ApiError 401 otherwise."""
        if _carries(request, self.embedded):
            return None
        for attempt in attempts:
            if _carries(request, self.of_attempt(attempt)):
                return attempt
        raise _refusal(request, _AGENT_HINT)

    def _made_of(self, name: str) -> str:
        digest = hmac.digest(self.secret.encode(), name.encode(), "sha256")
        return f"agl-{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def _sent(request: Request) -> list[str]:
    """The bearer token and, as many of Anthropic's clients send it, `x-api-key`; one of them is enough."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return [token.strip() if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")]


def _carries(request: Request, key: str) -> bool:
    return any(hmac.compare_digest(each.encode(), key.encode()) for each in _sent(request))


def _refusal(request: Request, hint: str) -> ApiError:
    found = "is not the right one" if request.headers.get("authorization") or any(_sent(request)) else "is missing"
    return ApiError(401, f"The API key (Authorization: Bearer …, or x-api-key) {found}. {hint}", code="invalid_api_key")


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _from_environment(name: str) -> str:
    key = os.environ.get(name, "").strip()
    if problem := problem_of_key(name, key):
        raise ServerError(problem)
    return key


def _read(file: Path) -> ServerFile | None:
    try:
        return ServerFile.model_validate_json(file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
