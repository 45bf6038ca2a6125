"""What a trainer apart, and any other operator, asks of a Lightning Server: bodies of the routes that take its key."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, RootModel

from agl_core.config.models import SamplingSection
from agl_core.types import Mode, RolloutState
from agl_core.wire import AttemptRef
from agl_core.wire.body import Body

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
    """ValueError if it is no URL, or its port no port."""
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

    A row has the values of `agl_core.store.schema` in their order. Arrays are little-endian bytes (int32 token ids,
    float32 log-probabilities); numbers that JSON lacks are the texts "nan", "inf" and "-inf".
    """

    tables: dict[str, list[list[Cell]]] = Field(description="Rows, by table.")
    pieces: list[tuple[int, str | Binary]] = Field(
        [], description="Messages, tool schemas and blocks of prompt tokens, numbered; rows refer to them."
    )


class RunSettings(Body):
    """How a run's rollouts are sampled and tried."""

    sampling: SamplingSection | None = Field(description="None: as the agents ask.")
    seed: int = Field(ge=0)
    timeout: float = Field(gt=0, le=1e9, description="Seconds an attempt may take.")
    attempts: int = Field(ge=1, description="Tries per rollout.")
    agents: dict[str, tuple[str, ...]] = Field({}, description="By policy, the agents that it answers.")


class BeginRequest(Body):
    """POST /agl/v1/runs: a trainer begins the run's next incarnation; sent again with the same start, it is one."""

    run: _Id = Field(min_length=1)
    started: float = Field(allow_inf_nan=False, description="Unix seconds; tells one beginning from another.")
    config: JsonValue = Field(description="The configuration as resolved.")
    resumed_step: _Number | None = Field(description="The step of the checkpoint that it goes on from.")


class BeginReply(Body):
    """The incarnation that has begun; what earlier ones left unfinished has ended as lost."""

    incarnation: int


class FinishRequest(Body):
    """POST /agl/v1/runs/finish: the trainer stops, and rollouts wait for the next one; or the run is over."""

    incarnation: int
    over: bool = Field(description="Whether the run is over: workers are told so, and end.")


class Registration(Body):
    """PUT /agl/v1/upstream: where the trainer's engine serves, and how; to be sent again before it expires."""

    incarnation: int = Field(description="Of the trainer; a later one replaces it.")
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
        description="Seconds until the server takes the trainer for gone, unless this is sent again: rollouts then "
        "wait, and model calls are answered 503. None: never.",
    )


class VersionsRequest(Body):
    """PUT /agl/v1/versions: policies were updated."""

    incarnation: int
    versions: dict[str, int]


class EnqueueRequest(Body):
    """POST /agl/v1/rollouts: have these rollouts run; those that were added before are left alone."""

    rollouts: PackedRecords


class DoneRequest(Body):
    """POST /agl/v1/rollouts/done: which of these are done? Waits for one; asking changes nothing."""

    ids: list[_Id] = Field(max_length=MAX_IDS)
    wait: float = Field(0.0, ge=0, le=LONGEST_WAIT, description="Seconds to wait for the first one.")


class CancelRequest(Body):
    """POST /agl/v1/rollouts/cancel: end these; those that are done, or unknown, stay as they are."""

    ids: list[_Id] = Field(max_length=MAX_IDS)


class RunsQuery(Body):
    """Every incarnation of every run."""

    kind: Literal["runs"] = "runs"


class RolloutsQuery(Body):
    """Rollouts that match, oldest first."""

    kind: Literal["rollouts"] = "rollouts"
    run: str | None = None
    step: _Number | None = None
    mode: Mode | None = None
    state: RolloutState | None = None
    group: str | None = None
    limit: _Number | None = None


class RolloutQuery(Body):
    """The rollout whose id is `prefix`, else the only one whose id starts with it."""

    kind: Literal["rollout"] = "rollout"
    prefix: str


class AttemptsQuery(Body):
    """Every attempt of a rollout."""

    kind: Literal["attempts"] = "attempts"
    rollout: str


class RecordsQuery(Body):
    """What was recorded of some attempts."""

    kind: Literal["calls", "outcomes", "rewards", "uses"]
    attempts: list[AttemptRef] = Field(max_length=MAX_ATTEMPTS)


StoreQuestion: TypeAlias = RunsQuery | RolloutsQuery | RolloutQuery | AttemptsQuery | RecordsQuery


class StoreQuery(RootModel[Annotated[StoreQuestion, Field(discriminator="kind")]]):
    """POST /agl/v1/store/query: one of the questions that `agl_core.store.interface.Store` answers."""


class RecordsPart(Body):
    """POST /agl/v1/store/parts: some of the records that are to be written together; sent again, it is the same one.

    The server keeps them until they are written, but not over its end.
    """

    put: _Id = Field(min_length=1, description="Names what is written together: a text that nobody else has.")
    number: int = Field(ge=0, lt=MAX_PARTS, description="Which part it is, from 0 on.")
    records: PackedRecords


class PartsRequest(Body):
    """POST /agl/v1/store/parts/write: write the records of all parts, all or none."""

    put: _Id = Field(min_length=1)
    count: int = Field(ge=1, le=MAX_PARTS, description="How many parts there are.")


class Accepted(Body):
    """It was done, and is in the store where it belongs there."""
