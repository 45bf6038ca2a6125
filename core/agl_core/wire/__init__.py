"""What crosses the wire between Lightning Server and Lightning Clients: headers, paths and bodies.

Here is what agents and workers need; what a trainer apart asks of the server is in `wire.operators`.
"""

from __future__ import annotations

from pydantic import Field, JsonValue

from agl_core.types import Ending, Mode, OutcomeStatus
from agl_core.wire.body import Body

HEADER_ROLLOUT = "x-agl-rollout"
"""`ROLLOUT/ATTEMPT`: which attempt a request belongs to; the same as the path prefix /rollout/R/attempt/A."""
HEADER_AGENT = "x-agl-agent"
"""Who makes the call; percent-encoded (`urllib.parse.unquote`), since headers are ASCII and names are not."""
HEADER_PARENT_SPAN = "x-agl-parent-span"
"""The span that encloses the call."""
HEADER_STATE = "x-agl-state"
"""The agent's semantic variables at the call, as `agl_core.capture.variables` packs them."""
HEADER_RETRY = "x-agl-retry"
"""One value for a request and its retries by the client."""
HEADER_POLICY = "x-agl-policy-version"
"""On an upstream's reply: the policy version that sampled it."""

WORKER_KEY = "AGL_WORKER_KEY"
"""The environment variable that holds the workers' key."""
OPERATOR_KEY = "AGL_OPERATOR_KEY"
"""The environment variable that holds the operator's key, which a trainer apart needs."""
SERVER_FILE = "server.json"
"""In the run's folder: a `ServerFile`, readable by its owner alone."""
MAX_REPORTS = 10_000
"""Outcomes, and rewards, that one attempt may report."""
MAX_LEASES = 4096
"""Attempts that one request may ask for, or name in a heartbeat."""
MAX_BODY = 8 << 20
"""Bytes of a request's body."""
MAX_RECORDS = 64 << 20
"""Bytes of a body with records, which operators alone may send: to the paths `TAKE_RECORDS`."""
TAKE_RECORDS = frozenset({"/agl/v1/rollouts", "/agl/v1/store/records", "/agl/v1/store/parts"})
MAX_RESULT = 7 << 20
"""Bytes of an attempt's result as JSON; what else is reported of the attempt has to have room in the same body."""
MAX_DEPTH = 190
"""Arrays and objects in one another, in a result; the server reads no body that is deeper than 200."""


def rollout_path(rollout: str, attempt: int) -> str:
    """The path prefix that stands before /v1 in an attempt's own base URL."""
    return f"/rollout/{rollout}/attempt/{attempt}"


class ServerFile(Body):
    """How workers and trainers on the same machine find a run's server, and how its keys survive a restart."""

    base_url: str
    worker_key: str | None = Field(repr=False, description="None: it is in the environment, and is not written down.")
    operator_key: str | None = Field(None, repr=False, description="None: as for the workers' key.")
    agent_secret: str = Field(repr=False, description="What the agents' keys are made of.")
    over: bool = Field(False, description="The run has made its last step, and nobody serves it there any more.")


class LeaseRequest(Body):
    """POST /agl/v1/leases: a worker asks for rollouts."""

    worker: str = Field(min_length=1, max_length=200)
    capacity: int = Field(ge=1, le=MAX_LEASES)
    wait: float = Field(0.0, ge=0, le=60, description="Seconds to wait for the first one.")


class Lease(Body):
    """One attempt, lent to a worker."""

    rollout: str
    attempt: int
    task_id: str
    task_input: JsonValue
    task_split: str
    mode: Mode
    timeout: float
    path: str = Field(description="The path prefix of the attempt's own base URL.")
    key: str = Field(repr=False, description="The agent's API key: good for this attempt's calls and spans only.")
    heartbeat: float = Field(description="Seconds between heartbeats.")
    expires: float = Field(
        description="Seconds without a heartbeat after which the attempt is lost. They count from the worker's first "
        "heartbeat on; a worker that never sends one keeps its attempts until their timeout."
    )


class LeaseReply(Body):
    """What a worker is lent."""

    leases: list[Lease]
    closed: bool = Field(False, description="There will be no more: the run is over.")


class AttemptRef(Body):
    """Names one attempt."""

    rollout: str
    attempt: int = Field(ge=0, lt=2**31)


class HeartbeatRequest(Body):
    """POST /agl/v1/heartbeats: a worker lives, and still runs these attempts."""

    worker: str = Field(min_length=1, max_length=200)
    attempts: list[AttemptRef] = Field(max_length=MAX_LEASES)


class HeartbeatReply(Body):
    """What became of the attempts that a heartbeat named."""

    lost: list[AttemptRef] = Field(description="Those of them that no longer count: the worker ends them.")
    closed: bool = Field(False, description="The run is over.")


class OutcomeReport(Body):
    """A tool outcome as an adapter reports it."""

    id: str
    tool: str
    status: OutcomeStatus
    tool_call_id: str | None = None
    arguments: JsonValue = None
    result: JsonValue = None
    error: str | None = None
    agent: str | None = None
    span: str | None = None
    parent_span: str | None = None
    started: float | None = None
    ended: float | None = None


class RewardReport(Body):
    """A reward that the agent itself reports."""

    name: str = "reward"
    value: float = Field(allow_inf_nan=False)


class CloseRequest(Body):
    """POST /agl/v1/rollouts/R/attempts/A/close: how an attempt ended; sending it again changes nothing.

    It may have 8 MiB, and 200 arrays and objects in one another; where an agent leaves more, report a crash instead.
    """

    ending: Ending
    result: JsonValue = None
    error: str | None = None
    outcomes: list[OutcomeReport] = Field([], max_length=MAX_REPORTS)
    rewards: list[RewardReport] = Field([], max_length=MAX_REPORTS)


class CloseReply(Body):
    """What the end of an attempt was taken for."""

    counted: bool = Field(description="False: another attempt counts, or this one was already closed otherwise.")


class Health(Body):
    """GET /agl/v1/health: what the server is doing."""

    status: str = "ok"
    run: str | None = Field(description="The run that it serves; None: no trainer has begun one yet.")
    incarnation: int | None = Field(description="Which incarnation of the run it is; None: none has begun yet.")
    serving: bool = Field(description="Whether a trainer's engine is there to answer model calls.")
    queued: int = Field(description="Rollouts that wait for a worker.")
    running: int = Field(description="Attempts that workers hold.")
    waiting: int = Field(description="Requests for a lease that wait for a rollout.")
    counters: dict[str, int] = Field(description="What gateway and OTLP intake counted since the server's start.")


class Problem(Body):
    """What was wrong with a request."""

    message: str = Field(description="What, where, and what to do.")
    type: str
    code: str | None = None


class ErrorReply(Body):
    """The body of every answer that is no success."""

    error: Problem
