"""The requests of a remote trainer, or another operator: run rollouts, write and read records."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, RootModel

from agl_core.config.models import SamplingSection
from agl_core.types import Mode, RolloutState
from agl_core.wire.body import MAX_RECORDS, Body, Empty
from agl_core.wire.operation import Operation, Right
from agl_core.wire.workers import AttemptRef

MAX_IDS = 20_000
"""Rollouts that one request may name."""
MAX_ATTEMPTS = 20_000
"""Attempts that one question to the store may name."""
MAX_PARTS = 1024
"""Requests in which records may come that are written together."""
LONGEST_WAIT = 60.0
"""Seconds."""

_Id: TypeAlias = Annotated[str, Field(max_length=1000)]
_Number: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]


def _parsed(url: str) -> str:
    """ValueError if it is not a URL, or its port is invalid."""
    _ = urlsplit(url).port
    return url


_Url: TypeAlias = Annotated[
    str,
    Field(pattern=r"^https?://([A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[!-~]*)?$", max_length=1000),
    AfterValidator(_parsed),
]


class Binary(Body):
    """Bytes, as JSON has them."""

    base64: str


Cell: TypeAlias = str | int | float | Binary | None


class PackedRecords(Body):
    """Records, exactly: rows of the store's tables, as `agl_core.store.packing` makes and reads them.

    A row has the values of `agl_core.store.tables` in their order. Arrays are little-endian bytes (int32 token ids,
    float32 log-probabilities); numbers that JSON lacks are the texts "nan", "inf" and "-inf".
    """

    tables: dict[str, list[list[Cell]]] = Field(description="Rows, by table.")
    pieces: list[tuple[int, str | Binary]] = Field(
        [], description="Messages, tool schemas and blocks of prompt tokens, numbered; rows refer to them."
    )


class RunSettings(Body):
    """How a run's rollouts are sampled, and how often they are tried."""

    sampling: SamplingSection | None = Field(description="None: as the agents ask.")
    seed: int = Field(ge=0)
    timeout: float = Field(gt=0, le=1e9, description="Seconds an attempt may take.")
    attempts: int = Field(ge=1, description="Tries per rollout.")
    agents: dict[str, tuple[str, ...]] = Field({}, description="By policy, the agents that it answers.")


class BeginRequest(Body):
    """Begin the run's next restart. Repeated with the same start, it changes nothing."""

    run: _Id = Field(min_length=1)
    started: float = Field(allow_inf_nan=False, description="Unix seconds; distinguishes one start from another.")
    config: JsonValue = Field(description="The configuration as resolved.")
    resumed_step: _Number | None = Field(description="The step of the checkpoint that it goes on from.")


class BeginReply(Body):
    """The restart that has begun. What earlier ones left unfinished has ended as lost."""

    restart: int


class FinishRequest(Body):
    """The trainer stops: rollouts wait for the next one, unless the run is over."""

    restart: int
    over: bool = Field(description="Whether the run is over: then workers end.")


class Registration(Body):
    """Say where the trainer's engine serves, and how to sample; send it again before it expires."""

    restart: int = Field(description="Of the trainer; a later one replaces it.")
    urls: tuple[_Url, ...] = Field(min_length=1, max_length=1000, description="OpenAI-compatible, each ending in /v1.")
    models: dict[str, str] = Field(min_length=1, description="The served model name of each policy.")
    api_key: str = Field(repr=False, pattern=r"^[\x21-\x7e]*$", description="The bearer token to send there.")
    returns_ids: bool = Field(True, description="Whether replies carry token ids and log-probabilities.")
    context_length: int | None = None
    versions: dict[str, int] = Field(description="The version being served of each policy.")
    settings: RunSettings
    expires: float | None = Field(
        gt=0,
        le=1e9,
        description="Seconds after which the trainer counts as gone, unless this is sent again: rollouts then wait, "
        "and model calls are answered 503. None: never.",
    )


class VersionsRequest(Body):
    """Policies were updated."""

    restart: int
    versions: dict[str, int]


class EnqueueRequest(Body):
    """Run these rollouts; those that were added before stay as they are."""

    rollouts: PackedRecords


class DoneRequest(Body):
    """Which of these rollouts are done? Wait for one; asking changes nothing."""

    ids: list[_Id] = Field(max_length=MAX_IDS)
    wait: float = Field(0.0, ge=0, le=LONGEST_WAIT, description="Seconds to wait for the first one.")


class _Writing(Body):
    restart: int | None = Field(
        None,
        description="Of the trainer; it is refused once a later one has begun. None: of an operator, not a trainer.",
    )


class CancelRequest(_Writing):
    """End rollouts as cancelled; those that are done, or unknown, stay as they are."""

    ids: list[_Id] = Field(max_length=MAX_IDS)


class RunningAttempt(Body):
    """An attempt that a worker holds, and what it waits for. Times are seconds up to now."""

    rollout: str
    attempt: int
    worker: str
    running: float = Field(description="Since it was leased.")
    asking: float | None = Field(description="Since its oldest unanswered model call began; None: all are answered.")
    answered: float | None = Field(description="Since its latest model call was answered; None: none was yet.")


class Activity(Body):
    """What the rollouts of the run wait for."""

    serving: bool = Field(description="Whether a trainer's engine is there to answer model calls.")
    queued: int = Field(description="Rollouts that wait for a worker.")
    waiting: int = Field(description="Requests for a lease that wait for a rollout.")
    finished: float | None = Field(description="Seconds since a rollout ended; None: none has yet.")
    running: int = Field(description="Attempts that workers hold.")
    attempts: list[RunningAttempt] = Field(description="The oldest of them, at most 100.")


class RunsQuery(Body):
    """Every restart of every run."""

    kind: Literal["runs"] = "runs"


class RolloutsQuery(Body):
    """Rollouts that match, oldest first."""

    kind: Literal["rollouts"] = "rollouts"
    run: str | None = None
    step: _Number | None = None
    mode: Mode | None = None
    state: RolloutState | None = None
    group: str | None = None
    after: str | None = None
    limit: _Number | None = None
    newest: _Number | None = None


class RolloutQuery(Body):
    """The rollout whose id is `prefix`, else the only one whose id starts with it."""

    kind: Literal["rollout"] = "rollout"
    prefix: str


class AttemptsQuery(Body):
    """Every attempt of some rollouts."""

    kind: Literal["attempts"] = "attempts"
    rollouts: list[str] = Field(max_length=MAX_ATTEMPTS)


RecordsName: TypeAlias = Literal["calls", "tool_results", "rewards", "training_records"]


class RecordsQuery(Body):
    """What was recorded of some attempts."""

    kind: RecordsName
    attempts: list[AttemptRef] = Field(max_length=MAX_ATTEMPTS)


StoreQuestion: TypeAlias = RunsQuery | RolloutsQuery | RolloutQuery | AttemptsQuery | RecordsQuery


class StoreQuery(RootModel[Annotated[StoreQuestion, Field(discriminator="kind")]]):
    """Read records: one of the questions that `agl_core.store.interface.Store` answers."""


class PutRequest(_Writing):
    """Write records, all or none; a record with the key of an earlier one replaces it."""

    records: PackedRecords


class RecordsPart(_Writing):
    """Keep some of the records that are to be written together. The same part sent again replaces it.

    The server keeps parts in memory until they are written.
    """

    put: _Id = Field(min_length=1, description="Names what is written together, uniquely.")
    number: int = Field(ge=0, lt=MAX_PARTS, description="Which part it is, from 0 on.")
    records: PackedRecords


class PartsRequest(_Writing):
    """Write the records of all parts, all or none; a record with the key of an earlier one replaces it."""

    put: _Id = Field(min_length=1)
    count: int = Field(ge=1, le=MAX_PARTS, description="How many parts there are.")


_OPERATOR = Right.OPERATOR
_TAKEN = {409: "The server serves another run."}
_SUPERSEDED = {409: "Another trainer has begun a later restart."}
_KNOWN = {409: "Another rollout has that id, the run is over, or another trainer has begun a later restart."}
_NO_SUCH = {404: "One of the rollouts was never added."}
_MISSING = {409: "A part is not here: send all of them again; or another trainer has begun a later restart."}

BEGIN = Operation("begin", "POST", "/agl/v1/runs", _OPERATOR, BeginRequest, BeginReply, _TAKEN)
FINISH = Operation("finish", "POST", "/agl/v1/runs/finish", _OPERATOR, FinishRequest, Empty, _SUPERSEDED)
SERVE = Operation("serve", "PUT", "/agl/v1/upstream", _OPERATOR, Registration, Empty, _SUPERSEDED)
PUBLISH = Operation("publish", "PUT", "/agl/v1/versions", _OPERATOR, VersionsRequest, Empty, _SUPERSEDED)
ENQUEUE = Operation("enqueue", "POST", "/agl/v1/rollouts", _OPERATOR, EnqueueRequest, Empty, _KNOWN, MAX_RECORDS)
DONE = Operation("done", "POST", "/agl/v1/rollouts/done", _OPERATOR, DoneRequest, PackedRecords, _NO_SUCH, waits=True)
CANCEL = Operation("cancel", "POST", "/agl/v1/rollouts/cancel", _OPERATOR, CancelRequest, Empty, _SUPERSEDED)
PUT = Operation("put", "POST", "/agl/v1/store/records", _OPERATOR, PutRequest, Empty, _SUPERSEDED, MAX_RECORDS)
PUT_PART = Operation("put_part", "POST", "/agl/v1/store/parts", _OPERATOR, RecordsPart, Empty, _SUPERSEDED, MAX_RECORDS)
WRITE_PARTS = Operation("write_parts", "POST", "/agl/v1/store/parts/write", _OPERATOR, PartsRequest, Empty, _MISSING)
QUERY = Operation("query", "POST", "/agl/v1/store/query", _OPERATOR, StoreQuery, PackedRecords)

ACTIVITY = Operation("activity", "GET", "/agl/v1/activity", _OPERATOR, Empty, Activity)

OF_TRAINERS: tuple[Operation[Any, Any], ...] = (
    *(BEGIN, FINISH, SERVE, PUBLISH, ENQUEUE, DONE, CANCEL),
    *(PUT, PUT_PART, WRITE_PARTS, QUERY, ACTIVITY),
)
