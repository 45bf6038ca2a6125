"""The records of a run, one frozen dataclass for each kind. Training is computed from them alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from agl_core.types.names import Ending, FinishReason, Housekeeping, Mode, PrefixBreak, RolloutState, Source, ToolStatus

Json = Any
"""Any JSON value: None, bool, int, float, str, list or dict of these."""
Time = float
"""Unix seconds."""

Derived = TypeVar("Derived")

Tokens = NDArray[np.int32]
Logprobs = NDArray[np.float32]
TokenMask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Task:
    """One input for the agent."""

    id: str
    """Unique within its split."""
    input: Json
    split: str = "train"
    """A held-out task has the name of its set, unless its source gives it another split."""
    metadata: Mapping[str, Json] = field(default_factory=dict)
    """Data for rewards that the agent must not see, for instance the expected answer."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training or evaluation run; resuming it starts its next restart."""

    id: str
    restart: int
    """0 at first; each resume adds one."""
    started: Time
    config: Json
    """The configuration as resolved."""
    resumed_step: int | None = None
    """The step of the checkpoint this restart went on from; later steps of earlier ones are superseded."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One execution of the agent on one task."""

    id: str
    run: str
    restart: int
    group: str
    """Ties the rollouts of one task that are compared."""
    task: Task
    mode: Mode
    step: int
    """The training step it was made for; for an evaluation, the step before it."""
    member: int
    """0 … group size - 1; members share the task and differ in the sampling seed."""
    state: RolloutState = RolloutState.QUEUED
    counted_attempt: int | None = None
    ending: Ending | None = None
    """How the counted attempt ended."""
    position: int = 0
    """The group's place (0, 1, …) among all of training, or of the evaluation: a resumed run repeats it."""
    prompts: Mapping[str, Json] = field(default_factory=dict)
    """Texts of named prompts that replace the run's."""


class AttemptKey(NamedTuple):
    rollout: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a rollout."""

    rollout: str
    attempt: int
    """0 for the first try."""
    worker: str
    started: Time
    ended: Time | None = None
    ending: Ending | None = None
    result: Json = None
    error: str | None = None
    """The exception's type and message after a crash; a hint if it made no call; which reward rules failed, and why."""
    passed_through: Mapping[str, Json] | None = None
    """Numbers of requests that were passed on unrecorded (embeddings, audio, …), by route; None: there were none."""
    bypassed: Mapping[str, Json] | None = None
    """Numbers of calls to other model APIs, whose content agl does not see, by address; None: none was noticed."""

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.rollout, self.attempt)


@dataclass(frozen=True, slots=True)
class Identity:
    agent: str | None = None
    span: str | None = None
    """The call's own span in the framework's trace."""
    parent_span: str | None = None
    """The span that encloses the call; a tool run in the same span without a call id belongs to the call."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one call; None if the caller did not set them."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One sampled response of a call."""

    index: int
    message: Mapping[str, Json]
    """The assistant message as the agent got it."""
    finish_reason: FinishReason
    response_ids: Tokens | None = None
    """[T] int32, exactly as sampled, the end token included; None if the upstream returned none."""
    logprobs: Logprobs | None = None
    """[T] float32, natural log-probabilities under the sampling temperature (behaviour log-probabilities)."""
    mask: TokenMask | None = None
    """[T] bool, True where the policy sampled the token, False where it was forced; None: all sampled."""
    parse_error: str | None = None
    """The error of the tool calls in this response, if they did not parse."""
    lacks_ids: bool = False
    """True if the upstream counted more tokens than it returned ids."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One LLM invocation as the gateway saw it."""

    id: str
    """The id of the reply, which the client sees too."""
    rollout: str
    attempt: int
    sequence: int
    """The order in which calls of this attempt started, from 0."""
    policy: str
    version: int | None
    """The policy version that sampled the reply; None for an upstream that is not trained."""
    request: Mapping[str, Json]
    """The request; its conversation and tools as a chat completion has them, whatever the API."""
    choices: tuple[Choice, ...]
    started: Time
    ended: Time
    api: str = "chat.completions"
    agent: str | None = None
    """None if no adapter named it."""
    parent_span: str | None = None
    """The span that enclosed the call, for tools without call ids."""
    prompt_ids: Tokens | None = None
    """[P] int32; None if the upstream returned none."""
    requested: Sampling = Sampling()
    effective: Sampling = Sampling()
    """The sampling that was used, as the rollout's mode requires."""
    prefix_broken: PrefixBreak | None = None
    prefilled: int = 0
    """Prompt tokens computed for this call."""
    reused: int = 0
    """Prompt tokens taken from the cache."""
    late: bool = False
    """True if it ended after its attempt, or its client never got the reply and repeated it: it does not count."""
    state: Mapping[str, Json] | None = None
    """The agent's semantic variables at the call; None if they were not set."""
    undelivered: bool = False
    """True if the client hung up before the reply, or left the stream: the call does not count."""
    stamped: bool = True
    """True if the agent's HTTP library is one that agl knows, and so would name the agent."""
    ignored: str | None = None
    """Fields of the request that were not honoured, as in the reply's `x-agl-ignored`."""
    program: str | None = None
    """The command-line agent that made it, if it is one that agl knows (`agl_server.gateway.programs`)."""
    housekeeping: Housekeeping | None = None
    """Set if that program says that the call is no work on the task."""

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.rollout, self.attempt)

    @property
    def is_unattributed(self) -> bool:
        """True if nothing says who made it, nor to which call the tools after it belong."""
        return not self.stamped and self.agent is None and self.parent_span is None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool that ran after a call."""

    id: str
    """Unique among the tool results of its source and attempt; reported twice, it is recorded once."""
    rollout: str
    """Empty in a report of the agent's side, since the server knows it."""
    attempt: int
    tool: str
    status: ToolStatus
    tool_call_id: str | None = None
    arguments: Json = None
    result: Json = None
    error: str | None = None
    agent: str | None = None
    span: str | None = None
    parent_span: str | None = None
    """Joins it to the call with the same parent if it has no tool_call_id of its own."""
    started: Time | None = None
    ended: Time | None = None
    source: Source = Source.ADAPTER
    adapter: str | None = None
    """The adapter or instrumentation that saw it; None: the agent's own code, or the conversation."""
    status_rule: str | None = None
    """The rule that decided the status (docs/health.md), if one did."""


@dataclass(frozen=True, slots=True)
class Reward:
    rollout: str
    attempt: int
    name: str
    value: float
    source: str
    """The rule, or `agent` when the agent reported it."""
    call: str | None = None
    """The call it belongs to; None: the rollout's terminal reward."""
    choice: int = 0
    evidence: str | None = None
    """The reasons of the rule, for people; text of agents may be part of it."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """A judgement by somebody beside the agent on an attempt, or on one of its calls, perhaps long after its end."""

    rollout: str
    attempt: int
    id: str
    """Unique in its attempt; sent twice, it is recorded once."""
    received: Time
    said: Mapping[str, Json]
    """Its writers and readers define it."""
    call: str | None = None
    """The call that it judges; None: the whole attempt."""


class TransitionKey(NamedTuple):
    """Names one transition: one choice of one call."""

    rollout: str
    attempt: int
    call: str
    choice: int


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """The figures that an update saw of a response, to be compared with the call as it was recorded."""

    version: int
    """The policy version that was trained: the one before the update."""
    digest: str
    """Digest of its tokens and sampled log-probabilities in the batch (`agl_server.health.certificate`)."""
    precision: str
    """The numbers that sampling and training compute with: float32, bfloat16, …"""
    logprobs: Logprobs
    """[T] float32, under `version`, at the sampling temperature; NaN where a token has no weight in the loss."""


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """The outcome of one transition in the step that used it: "why did this token get this advantage?"."""

    rollout: str
    attempt: int
    call: str
    choice: int
    step: int
    credit: float | None
    """The credited value; its kind is the credit rule's."""
    advantage: float | None
    """Mean over the response's trainable tokens; None where it was not compared with others."""
    weight: float
    """Its summed token weights in the loss; 0 if dropped."""
    dropped: str | None = None
    """A `DropReason`, or None if it was trained on."""
    recomputed: Recomputed | None = None
    """None if it was not trained on, or the engine does not return them."""

    @property
    def key(self) -> TransitionKey:
        return TransitionKey(self.rollout, self.attempt, self.call, self.choice)


def derived(kind: type[Derived], *sources: object, **own: Any) -> Derived:
    """A record of this kind: the fields that the sources have under the same names, and its own."""
    shared: dict[str, Any] = {}
    for source in sources:
        names = _shared_fields(kind, type(source))  # type: ignore[arg-type]  # mypy takes no class as hashable
        shared |= {name: getattr(source, name) for name in names}
    return kind(**(shared | own))


@cache
def _shared_fields(*kinds: Any) -> frozenset[str]:
    return frozenset.intersection(*(frozenset(field.name for field in fields(kind)) for kind in kinds))


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRollout:
    """A rollout with what was recorded of one attempt at it."""

    rollout: Rollout
    attempt: Attempt
    calls: Sequence[Call]
    tool_results: Sequence[ToolResult]
    rewards: Sequence[Reward]
    annotations: Sequence[Annotation] = ()
    terminal: float | None = None
    """Its terminal reward in the run that it is of; None without one."""

    @property
    def records(self) -> Sequence[Any]:
        return [self.rollout, self.attempt, *self.calls, *self.tool_results, *self.rewards, *self.annotations]
