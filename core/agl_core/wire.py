"""The protocol between a Lightning Server and its workers: the requests below /agl/v1, and the keys that they need.

Each request is described once, as an `Operation`, of which the server's routes, its OpenAPI document and the clients
are made. A source of rollouts may bring others.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from agl_core import private
from agl_core.errors import ConfigError
from agl_core.types import Ending, Mode, ToolResult

Asked = TypeVar("Asked", bound=BaseModel)
Answer = TypeVar("Answer", bound=BaseModel)

MAX_BODY = 8 << 20
"""Bytes of a request's body."""
MAX_VALUES = 200_000
"""JSON values in a body of a worker or an agent."""
MAX_REPORTS = 10_000
"""Tool results, and rewards, per attempt."""
MAX_BYPASSED, MAX_ADDRESS = 100, 500
"""Addresses of other model APIs per attempt, and the characters of one."""
MAX_LEASES = 4096
"""Attempts per lease request or heartbeat."""
MAX_RESULT = 7 << 20
"""Bytes of an attempt's result as JSON; its other reports share the body."""
MAX_DEPTH = 190
"""Nested arrays and objects in a result; the server reads bodies up to 200 deep."""


class Body(BaseModel):
    """A request's or reply's body; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Empty(Body):
    """An empty body. As a reply: the request was carried out, and its records are in the store."""


class Right(StrEnum):
    """The holder of the key that a request needs."""

    WORKER = "worker"
    OPERATOR = "operator"
    EITHER = "worker or operator"
    LEASE = "lease"
    """The lease of the attempt that the path names."""


@dataclass(frozen=True, eq=False)
class Operation(Generic[Asked, Answer]):
    """A request's method, path, key and bodies."""

    method: str
    path: str
    """`{rollout}` and `{attempt}` in it name an attempt."""
    right: str
    """A `Right`, or one that a source of rollouts grants."""
    body: type[Asked]
    """`Empty`: no body is read."""
    reply: type[Answer]
    largest: int = MAX_BODY
    """Bytes of the request's body."""
    waits: bool = False
    """True if the reply may wait; the work ends when the client goes away."""

    @property
    def has_body(self) -> bool:
        return self.body is not Empty


AnyOperation: TypeAlias = Operation[Any, Any]


class LeaseRequest(Body):
    """Lease rollouts to a worker; wait for the first."""

    worker: str = Field(min_length=1, max_length=200)
    capacity: int = Field(ge=1, le=MAX_LEASES)
    wait: float = Field(0.0, ge=0, le=60, description="Seconds to wait for the first one.")


class AttemptRef(Body):
    """One attempt's name."""

    rollout: str
    attempt: int = Field(ge=0, lt=2**31)


class Assignment(AttemptRef):
    """The part of an attempt that its agent's process may know."""

    task_id: str
    task_input: JsonValue
    task_split: str
    mode: Mode
    path: str = Field(description="The path prefix of the attempt's own base URL.")
    key: str = Field(repr=False, description="The agent's API key: good for this attempt's calls and spans only.")
    prompts: dict[str, str] = Field({}, description="The texts of the agent's named prompts, by name.")


class Lease(Assignment):
    """One attempt that a worker holds."""

    secret: str = Field(
        repr=False,
        description="Heartbeats and the report of the attempt's end need it. The worker hides it from the agent.",
    )
    timeout: float
    heartbeat: float = Field(
        description="Seconds between heartbeats. After four times as many without one the attempt is lost, from the "
        "worker's first heartbeat on; a worker that never sends one keeps its attempts until their timeout."
    )

    @property
    def assignment(self) -> Assignment:
        return Assignment(**self.model_dump(include=set(Assignment.model_fields)))


class LeaseReply(Body):
    """The attempts for a worker."""

    leases: list[Lease]
    closed: bool = Field(False, description="There will be no more: the run is over.")


class HeldAttempt(AttemptRef):
    """One attempt's name, and the proof that the worker holds it."""

    secret: str = Field(max_length=200, repr=False, description="The secret of its lease.")


class HeartbeatRequest(Body):
    """Extend the leases of a worker that lives and still runs these attempts."""

    worker: str = Field(min_length=1, max_length=200)
    attempts: list[HeldAttempt] = Field(max_length=MAX_LEASES)


class HeartbeatReply(Body):
    """The state of the attempts that a heartbeat names."""

    lost: list[AttemptRef] = Field(description="Attempts that do not count, or are not its own: it ends them.")
    closed: bool = Field(False, description="The run is over.")


class RewardReport(Body):
    """A reward from the agent itself."""

    name: str = "reward"
    value: float = Field(allow_inf_nan=False)
    call: str | None = Field(None, description="The id of the reply that it is for; null: the rollout.")


class CloseRequest(Body):
    """End an attempt. Sending it again changes nothing.

    The body may have 8 MiB, and arrays and objects nested 200 deep. If an agent returns more, report a crash instead.
    """

    ending: Ending
    result: JsonValue = None
    error: str | None = None
    tool_results: list[ToolResult] = Field([], max_length=MAX_REPORTS)
    rewards: list[RewardReport] = Field([], max_length=MAX_REPORTS)
    bypassed: dict[str, int] = Field(
        {}, max_length=MAX_BYPASSED, description="How often the agent called model APIs that are not agl's, by address."
    )


class CloseReply(Body):
    """The answer to a `CloseRequest`."""

    counted: bool = Field(description="False: another attempt counts, or this one was already closed otherwise.")


class RunningAttempt(AttemptRef):
    """An attempt that a worker holds. Times are in seconds up to now."""

    worker: str
    running: float = Field(description="Since it was leased.")
    asking: float | None = Field(description="Since its oldest unanswered model call began; None: all are answered.")
    answered: float | None = Field(description="Since its latest model call was answered; None: none was yet.")


class Activity(Body):
    """The server's health, and the state of its rollouts."""

    status: str = "ok"
    serving: bool = Field(description="Whether an engine is there to answer model calls.")
    queued: int = Field(description="Rollouts that wait for a worker.")
    running: int = Field(description="Attempts that workers hold.")
    waiting: int = Field(description="Requests for a lease that wait for a rollout.")
    counters: dict[str, int] = Field({}, description="What a source of rollouts counted since the server's start.")
    finished: float | None = Field(description="Seconds since a rollout ended; None: none has yet.")
    attempts: list[RunningAttempt] = Field(description="The oldest of them, at most 100.")


LEASE = Operation("POST", "/agl/v1/leases", Right.WORKER, LeaseRequest, LeaseReply, waits=True)
HEARTBEAT = Operation("POST", "/agl/v1/heartbeats", Right.WORKER, HeartbeatRequest, HeartbeatReply)
CLOSE = Operation("POST", "/agl/v1/rollouts/{rollout}/attempts/{attempt}/close", Right.LEASE, CloseRequest, CloseReply)
HEALTH = Operation("GET", "/agl/v1/health", Right.EITHER, Empty, Activity)

WORKER_KEY = "AGL_WORKER_KEY"
"""Environment variable with the workers' key."""
OPERATOR_KEY = "AGL_OPERATOR_KEY"
"""Environment variable with the operator's key, which opens the view from other machines."""
SERVER_FILE = "server.json"
"""A run's `ServerFile`, in its folder."""


class ServerFile(Body):
    """How workers and commands on the same machine find a run's server, and how its keys survive a restart."""

    base_url: str
    worker_key: str | None = Field(repr=False, description="None: it is in the environment, and is not written down.")
    operator_key: str | None = Field(None, repr=False, description="None: as for the workers' key.")
    agent_secret: str = Field(repr=False, description="What the keys of leases and agents are made of.")
    begun: bool = Field(False, description="A trainer has begun the run: the store beside this file has it.")
    over: bool = Field(False, description="The run has made its last step, and is no longer served there.")

    @classmethod
    def read(cls, path: Path) -> ServerFile | None:
        """None if there is no file, or another version of agl wrote it."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, path: Path) -> None:
        """Replace the file; only its owner can read it."""
        private.replace(path, self.model_dump_json())


def take_keys() -> dict[str, str]:
    """The keys that the user chose, stripped, by the names of their variables.

    Both variables are removed from the environment, as child processes may belong to an agent, and from the initial
    environment that the system shows of this process (/proc/PID/environ on Linux).
    """
    keys = {name: take_key(name) for name in (WORKER_KEY, OPERATOR_KEY)}
    return {name: key for name, key in keys.items() if key}


def take_key(name: str) -> str | None:
    """The key in this variable, removed as by `take_keys`; None if there is none."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if address := getenv(name.encode()):  # Removing it from `os.environ` leaves its value in memory.
        ctypes.memset(address, ord(" "), len(ctypes.string_at(address)))
    return os.environ.pop(name, "").strip() or None


def take_key_of(setting: str, variable: str | None) -> str | None:
    """The key in the variable that a setting names (None: no key), removed as by `take_keys`.

    ConfigError if the variable is not set, or no header can carry its key.
    """
    if variable is None:
        return None
    key = take_key(variable)
    if key is None:
        raise ConfigError(
            f"{setting}: the environment variable {variable} is not set. Set it to the key of that server, or leave "
            f"{setting} out."
        )
    if problem := problem_of_key(variable, key):
        raise ConfigError(problem)
    return key


def problem_of_key(name: str, key: str) -> str | None:
    """The fault of a key from `name`, without showing it; None if it is valid.

    >>> problem_of_key("AGL_WORKER_KEY", "s3cret"), problem_of_key("AGL_WORKER_KEY", "a\\nb")
    (None, 'AGL_WORKER_KEY has a line break or another control character in it, which no HTTP header can carry.')
    """
    if not key.isascii():
        return f"{name} has characters that no HTTP header can carry: use ASCII only."
    if not key.isprintable():
        return f"{name} has a line break or another control character in it, which no HTTP header can carry."
    return None
