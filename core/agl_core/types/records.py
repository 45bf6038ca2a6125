"""What is recorded of a run: one frozen dataclass per kind of row, keyed as DESIGN's section 4 says.

Everything that happens becomes one of these, and everything that is learned is computed from them alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agl_core.types.names import Ending, FinishReason, Mode, OutcomeStatus, RolloutState

Json = Any
"""Any JSON value: None, bool, int, float, str, list or dict of these."""

Tokens = NDArray[np.int32]
Logprobs = NDArray[np.float32]
TokenMask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Task:
    """One input for the agent."""

    id: str
    """Unique within its split."""
    input: Json
    """What the agent is called with."""
    split: str = "train"
    metadata: Mapping[str, Json] = field(default_factory=dict)
    """What rewards need and the agent must not see (the expected answer, say)."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training or evaluation run; resuming it starts its next incarnation."""

    id: str
    incarnation: int
    """0 at first; each resume adds one."""
    started: float
    """Unix seconds."""
    config: Json
    """The configuration as resolved."""
    resumed_step: int | None = None
    """The step of the checkpoint this incarnation went on from; later steps of earlier ones are superseded."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One execution of the agent on one task."""

    id: str
    run: str
    incarnation: int
    group: str
    """Ties the rollouts of one task that are compared."""
    task: Task
    mode: Mode
    step: int
    """The training step it was made for (evaluations: the step they follow)."""
    member: int
    """0 … group size - 1; members share the task and differ in the sampling seed."""
    state: RolloutState = RolloutState.QUEUED
    counted_attempt: int | None = None
    """The attempt that counts, once done."""
    ending: Ending | None = None
    """How the counted attempt ended."""


class AttemptKey(NamedTuple):
    """Names one attempt."""

    rollout: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a rollout."""

    rollout: str
    attempt: int
    """0 for the first try."""
    worker: str
    started: float
    ended: float | None = None
    ending: Ending | None = None
    result: Json = None
    """What the agent returned."""
    error: str | None = None
    """The exception's type and message, when it crashed; a hint what to do, when it made no call."""

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.rollout, self.attempt)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who makes a call."""

    agent: str | None = None
    """The agent's or node's name."""
    span: str | None = None
    """The call's own span in the framework's trace."""
    parent_span: str | None = None
    """The span that encloses the call; a tool run in the same span without a call id belongs to the call."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one call; None where the caller said nothing."""

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
    """What was wrong with the tool calls in this response, if they did not parse."""


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
    started: float
    ended: float
    api: str = "chat.completions"
    agent: str | None = None
    """Who made the call, as an adapter told; None if no adapter did."""
    parent_span: str | None = None
    """The span that enclosed the call, for tools without call ids."""
    state: Mapping[str, Json] | None = None
    """The agent's semantic variables when it made the call; None if nobody told them."""
    prompt_ids: Tokens | None = None
    """[P] int32; None if the upstream returned none."""
    requested: Sampling = Sampling()
    """What the agent's code asked for."""
    effective: Sampling = Sampling()
    """What the rollout's mode made of it."""
    prefix_broken: bool = False
    """An earlier reply was echoed, but its recorded ids could not be spliced in."""
    prefilled: int = 0
    """Prompt tokens computed for this call."""
    reused: int = 0
    """Prompt tokens taken from the cache."""
    late: bool = False
    """It does not count: it ended after its attempt was closed, or its client never got the reply and asked again."""
    retry_of: str | None = None
    """The marker of the client's own retry: calls of one attempt with the same marker are one call."""

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.rollout, self.attempt)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a tool did after a call."""

    id: str
    """Unique: the same outcome reported twice is recorded once."""
    rollout: str
    attempt: int
    tool: str
    status: OutcomeStatus
    tool_call_id: str | None = None
    arguments: Json = None
    result: Json = None
    error: str | None = None
    """The exception's type and message."""
    agent: str | None = None
    span: str | None = None
    parent_span: str | None = None
    """Joins the outcome to the call of the same parent when there is no tool_call_id."""
    started: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class Reward:
    """One named reward with its provenance."""

    rollout: str
    attempt: int
    name: str
    value: float
    source: str
    """The rule, or `agent` when the agent reported it."""
    call: str | None = None
    """The call it belongs to; None: the rollout's terminal reward."""
    choice: int = 0


class TransitionKey(NamedTuple):
    """Names one transition: one choice of one call."""

    rollout: str
    attempt: int
    call: str
    choice: int


@dataclass(frozen=True, slots=True)
class Use:
    """What one step made of one transition; answers "why did this token get this advantage?"."""

    rollout: str
    attempt: int
    call: str
    choice: int
    step: int
    credit: float | None
    """The credited value; its kind is the credit rule's."""
    advantage: float | None
    """Mean over the response's trainable tokens."""
    weight: float
    """Its summed token weights in the loss; 0 if dropped."""
    dropped: str | None = None
    """A `DropReason`, or None if it was trained on."""

    @property
    def key(self) -> TransitionKey:
        return TransitionKey(self.rollout, self.attempt, self.call, self.choice)
