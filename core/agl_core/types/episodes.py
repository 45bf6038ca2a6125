"""The unified data interface: an agent's run as a Markov decision process (Agent Lightning, section 3.1).

A call is one transition: its observation is the prompt, its action the whole response.

Credit rules build on the return of an episode and of each of its transitions. In their formulas

    r_t   the intermediate rewards of transition t; the terminal reward is added at the last call of the main thread
    R     the episode's return: the terminal reward and every r_t, undiscounted
    G_t   what came from t on: r_t + γ · (G_{t+1} + Σ over the threads that t started: G of their calls alone)

Time is counted in calls, trained or not, housekeeping aside, and in *threads* (`Lineage`): t+1 is the next call of the
thread; after the last one of a thread that a call started, the next of the thread around it, which goes on with what it
was told; after a thread that nobody waited for, the last call of the main thread. So threads side by side are not in
each other's future, and long ones do not shrink what their parent earns later.

The choices of one call (`n` > 1) are parallel, too: later calls are in the future of each, and each choice of the last
call has the terminal reward. To the calls before it and to R, a call is worth the mean over its choices, so more
choices do not earn more. Rules state what they conserve for calls with one choice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agl_core.types.names import (
    CreditKind,
    DropReason,
    Ending,
    FinishReason,
    Housekeeping,
    LineageKind,
    Mode,
    PrefixBreak,
)
from agl_core.types.records import (
    Annotation,
    Json,
    Logprobs,
    Reward,
    Task,
    TokenMask,
    Tokens,
    ToolResult,
    TransitionKey,
)

Thread: TypeAlias = tuple[tuple[int, int], ...]
"""The turns of its first call and of the one that started it, after those of the threads around; () is the main one."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """A conversation of an episode (`agl_server.training.lineages`)."""

    number: int = 0
    """0, 1, … in the order in which they began."""
    kind: LineageKind = LineageKind.MAIN
    parent: str | None = None
    """The call that it branched from; None for one that began by itself."""
    thread: Thread = ()
    """Time goes on in threads (see the module): lineages that follow each other share one."""


@dataclass(frozen=True, slots=True, eq=False)
class Transition:
    """(observation, action, reward) of one call."""

    key: TransitionKey
    agent: str | None
    turn: int
    """0, 1, … in the episode, by the order in which the calls started."""
    agent_turn: int
    """0, 1, … among the calls of its lineage; where no server has told lineages, among this agent's."""
    policy: str
    version: int | None
    messages: tuple[Mapping[str, Json], ...]
    """The observation, in chat form."""
    response: Mapping[str, Json]
    """The action as the agent got it: an assistant message."""
    finish_reason: FinishReason
    temperature: float
    """The effective sampling temperature; the trainer divides logits by it."""
    prompt_ids: Tokens | None = None
    response_ids: Tokens | None = None
    logprobs: Logprobs | None = None
    mask: TokenMask | None = None
    parse_error: str | None = None
    lacks_ids: bool = False
    prefix_broken: PrefixBreak | None = None
    tool_results: tuple[ToolResult, ...] = ()
    """The tool results of this response's tool calls, in their order."""
    rewards: tuple[Reward, ...] = ()
    """Intermediate rewards, with provenance."""
    parent_span: str | None = None
    distorted: bool = False
    """True if it was drawn from another distribution than that of `logprobs` (`agl_core.learning.transitions`)."""
    grammar: str | None = None
    """The form that the model server had to give the response (`agl_core.learning.transitions.grammar_of`), if any;
    `logprobs` are those among the tokens that it allowed."""
    state: Mapping[str, Json] | None = None
    """The agent's semantic variables at the call (`agl_core.state`), of bounded size; None if they were not set."""
    tools: tuple[Mapping[str, Json], ...] = ()
    """The tools that the request offered, as a chat completion has them: part of the observation."""
    had_to_call: bool = False
    """True if the request forced a tool call, as for structured output."""
    lineage: Lineage = Lineage()
    housekeeping: Housekeeping | None = None
    """Why it is no work on the task, if it is not."""
    program: str | None = None

    @property
    def has_ids(self) -> bool:
        """True if prompt and response token ids were both recorded."""
        return self.prompt_ids is not None and self.response_ids is not None

    @property
    def reward(self) -> float:
        """The sum of its intermediate rewards."""
        return sum(r.value for r in self.rewards)


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """The ordered transitions of one rollout and its terminal reward."""

    rollout: str
    attempt: int
    group: str
    member: int
    task: Task
    mode: Mode
    ending: Ending
    transitions: tuple[Transition, ...]
    result: Json = None
    rewards: tuple[Reward, ...] = ()
    """Components of the terminal reward, and all that the agent reported, with provenance."""
    terminal: float | None = None
    """The terminal reward R; None until rewards were computed."""
    dropped: DropReason | None = None
    unjoined: tuple[ToolResult, ...] = ()
    """Tool results that belong to no recorded call; counted and shown."""
    undelivered: tuple[Transition, ...] = ()
    """Transitions whose replies reached no client: not credited, not trained on. Each has the next counted turn."""
    housekeeping: tuple[Transition, ...] = ()
    """Calls that a program made for itself: not credited, not trained on, and in no count of calls."""
    passed_through: Mapping[str, Json] | None = None
    bypassed: Mapping[str, Json] | None = None
    unattributed: int = 0
    """Number of calls that nothing attributes to an agent. Tool results without an id that may be theirs are not
    joined."""
    annotations: tuple[Annotation, ...] = ()
    """Judgements by others than the agent, the earliest first."""
    step: int = 0
    """The training step that it was made for, or that trained on it."""

    @property
    def delivered(self) -> list[Transition]:
        """Its transitions and its housekeeping, in the order in which the calls started."""
        return sorted((*self.transitions, *self.housekeeping), key=attrgetter("turn"))


EQUAL_WITHIN = 1e-9
"""Values are equal if they differ by no more than this share of the largest: 0.3 and 0.1 + 0.2 are one reward."""
ALMOST_ZERO = 1e-13
"""They may also differ by this: 0.1 + 0.2 - 0.3 and 0 are one reward."""


def rounding(largest: Any) -> Any:
    """The tolerance between equal values whose largest magnitude is `largest`; a float or a tensor."""
    return largest * EQUAL_WITHIN + ALMOST_ZERO


def are_equal(values: Iterable[float]) -> bool:
    """True if all are equal but for rounding, so that there is nothing to learn from their comparison.

    >>> are_equal([0.3, 0.1 + 0.2]), are_equal([0.3, 0.3001]), are_equal([0.1 + 0.2 - 0.3, 0]), are_equal([])
    (True, False, True, True)
    """
    listed = list(values)
    return not listed or max(listed) - min(listed) <= rounding(max(map(abs, listed)))


def episode_return(episode: Episode) -> float:
    """The undiscounted return: the terminal reward plus what every call earned, the mean over its choices."""
    by_turn = groupby(episode.transitions, key=attrgetter("turn"))
    return (episode.terminal or 0.0) + sum(fmean(t.reward for t in choices) for _, choices in by_turn)


def scored_return(episode: Episode) -> float | None:
    """How good a run says that a rollout was: its return, or None if it was dropped unscored."""
    return None if episode.terminal is None else episode_return(episode)


def discounted_returns(episode: Episode, gamma: float) -> list[float]:
    """G_t of every transition (see the module)."""
    return episode_gae(episode, [0.0] * len(episode.transitions), gamma, 1.0)


def episode_gae(episode: Episode, values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """`gae` of every transition, by its rewards, the terminal one too, and the `values` of their states."""
    pairs = zip(episode.transitions, values, strict=True)
    return gae([Moment(t.turn, t.lineage.thread, t.reward, v) for t, v in pairs], gamma, lam, episode.terminal or 0.0)


class Moment(NamedTuple):
    """A choice of a call, in time."""

    turn: int
    thread: Thread
    reward: float
    value: float | None = None
    """The value of its state; None for a call of the environment."""


def gae(calls: Sequence[Moment], gamma: float, lam: float, terminal: float = 0.0) -> list[float]:
    """Generalized advantages over calls (arXiv 1506.02438, equation 16); G with λ = 1 and no values.

        A_t = r_t + γ · Σ G of the threads that t started, alone + γ · V_{t+1} − V_t + γ · λ · A_{t+1}

    Calls of the environment take no time: their rewards, and threads that they started, come with the call before.
    """
    end = max((call.turn for call in calls if not call.thread), default=0)
    events = defaultdict[tuple[float, bool, Thread], list[int]](list)
    for i, call in enumerate(calls):
        events[math.inf if call.turn == end else call.turn, False, call.thread].append(i)
        for depth, (start, _) in enumerate(call.thread, 1):
            events[start, True, call.thread[:depth]] = []
    advantages, ahead = [0.0] * len(calls), dict[Thread, tuple[float, float]]()
    # By thread: what its calls from here on earn alone; what came before the next one of them without a call.
    alone, gained = defaultdict[Thread, float](float), defaultdict[Thread, float](float)
    for (time, is_start, thread), choices in sorted(events.items(), reverse=True):
        reward = fmean(calls[i].reward for i in choices) if choices else 0.0
        if is_start:
            gained[thread[:-1]] += gained.pop(thread, 0.0) + gamma * alone.pop(thread, 0.0)
        elif calls[choices[0]].value is None:
            gained[thread] += reward if math.isfinite(reward) else 0.0
        else:
            around = [thread[:depth] for depth in range(len(thread), -1, -1)]
            joined = next((at for at, other in enumerate(around) if other in ahead), len(thread))
            value, advantage = ahead.get(around[joined], (0.0, 0.0))
            after = sum(gained[other] for other in around[: joined + 1]) + (terminal if time == math.inf else 0.0)
            values = [calls[i].value or 0.0 for i in choices]
            for i, own in zip(choices, values, strict=True):
                advantages[i] = calls[i].reward + after + gamma * value - own + gamma * lam * advantage
            alone[thread] = reward + gained.pop(thread, 0.0) + gamma * alone[thread]
            ahead[thread] = fmean(values), fmean(advantages[i] for i in choices)
    return advantages


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """N transitions of one policy: flat arrays and offsets, no pads, from the store to the loss.

    Axis suffixes: _N transitions, _T all tokens, _R response tokens, _A absent rollouts.
    """

    tokens_T: NDArray[np.int32]
    """Prompt and response of every transition, one after the other."""
    offsets: NDArray[np.int64]
    """[N+1]; transition i owns tokens_T[offsets[i]:offsets[i+1]]."""
    prompt_lengths_N: NDArray[np.int64]
    """The first prompt_lengths_N[i] tokens of transition i are its prompt."""
    response_offsets: NDArray[np.int64]
    """[N+1]; transition i owns the response-aligned arrays' [response_offsets[i]:response_offsets[i+1]]."""
    behaviour_logprobs_R: NDArray[np.float32]
    """Log-probabilities as recorded when the tokens were sampled; NaN where they are not known."""
    mask_R: NDArray[np.bool_]
    """True where a token takes part in the loss."""
    temperature_N: NDArray[np.float32]
    values_N: NDArray[np.float64]
    kind: CreditKind
    group_N: NDArray[np.int64]
    """0 … groups-1."""
    rollout_N: NDArray[np.int64]
    """0 … rollouts-1, unique over groups."""
    turn_N: NDArray[np.int64]
    version_N: NDArray[np.int64]
    """The policy version that sampled each transition; -1 if unknown."""
    keys: tuple[TransitionKey, ...]
    weight_N: NDArray[np.float64]
    """A factor of at least 0 on each transition's share in the loss; 1 by default."""
    sampled_N: NDArray[np.bool_]
    """True if the log-probabilities are known. Engines replace unknown ones by the policy's own before the update, so
    that importance weights are 1."""
    grammar_N: NDArray[np.object_]
    """The form that each response had to have, or None; see `Transition.grammar`."""
    step: int = 0
    """The training step (1, 2, …), for schedules: a policy may have no batch in some steps."""
    absent_values_A: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Credited values, a mean for each, of rollouts that are compared but have no transition to train on."""
    absent_groups_A: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    calls: Sequence[Sequence[Moment]] = ()
    """With rewards of one step: all calls of each rollout."""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def response_lengths_N(self) -> NDArray[np.int64]:
        return np.diff(self.response_offsets)
