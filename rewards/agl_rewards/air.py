"""AIR, automatic intermediate rewarding: tool results become rewards (Agent Lightning, arXiv 2508.03680).

The reward rule `tool_results` adds rewards of single calls, which any credit rule then shares out. The credit rule
`air` mixes a call's tool results with the rollout's terminal reward. The capability check refuses both together,
because a tool result counts once. In both, tool calls of a response that did not parse are one failure. Adapters report
tool results; without a report, the conversation's count (`agl_core.learning.tool_results`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat

from agl_core import Capability, CreditKind, credit_rule, episode_return
from agl_core.types import Episode, Reward, ToolResult, ToolStatus, Transition


@credit_rule(kind=CreditKind.RETURN, provides={Capability.TOOL_RESULTS})
def air(
    episodes: Sequence[Episode],
    *,
    alpha: Annotated[float, Field(ge=0, le=1, description="α: the share of a call's own tool results.")] = 0.2,
    reward: Annotated[
        Literal["terminal", "return"],
        Field(description="R: the terminal reward, or the return, which also contains the rewards of single calls."),
    ] = "terminal",
) -> list[list[float]]:
    """A call's value mixes its tool results with the terminal reward: α · status_t + (1 − α) · R.

    status_t is the mean over the tool results of t of +1 (ok) and −1 (error, timeout, empty); a transition without tool
    results gets R, the rollout's terminal reward (arXiv 2508.03680, automatic intermediate rewarding). Rewards that
    name a call are not included; with `reward = "return"` they are, undiscounted. The values are returns: each already
    contains R.

    Statuses are ±1, so R should lie in −1 … 1 too: with R = 3 a tool that succeeds lowers its call's value.

    Conserves: the value lies between status_t and R, and is R if α = 0 or the call has no tool result (with the return
    this is `identical`); if α < 1 a larger R always gives a larger value.
    """
    if reward == "terminal":
        return [_mixed(episode, alpha, episode.terminal or 0.0) for episode in episodes]
    return [_mixed(episode, alpha, episode_return(episode)) for episode in episodes]


class ToolResultsOptions(BaseModel):
    """Settings of `tool_results`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    default_weight: float = Field(0.2, ge=0, description="w of a tool that `weights` does not name.")
    weights: dict[str, NonNegativeFloat] = Field({}, description="w by tool name.")


def tool_results(options: ToolResultsOptions) -> Callable[[Episode], list[Reward]]:
    """Each call is rewarded for its tool results: +w if ok, −w on error, timeout or an empty result.

        [rewards.tool_results]
        weights = { memory = 0.30, search = 0.20 }        # any other tool: default_weight = 0.2

    The rewards are named `tool.place.status`, and belong to the call that asked for the tool (arXiv 2508.03680).
    """

    def rewards_of(transition: Transition) -> Iterator[tuple[str, float]]:
        for place, tool_result in enumerate(transition.tool_results):
            weight = options.weights.get(tool_result.tool, options.default_weight)
            yield f"{tool_result.tool}.{place}.{tool_result.status}", weight * _signed(tool_result)
        if transition.parse_error is not None:
            yield "unparsed", -options.default_weight

    def reward_calls(episode: Episode) -> list[Reward]:
        return [
            Reward(episode.rollout, episode.attempt, name, value, "tool_results", t.key.call, t.key.choice)
            for t in episode.transitions
            for name, value in rewards_of(t)
        ]

    return reward_calls


def _mixed(episode: Episode, alpha: float, whole: float) -> list[float]:
    statuses = [_statuses(transition) for transition in episode.transitions]
    return [alpha * mean(status) + (1 - alpha) * whole if status else whole for status in statuses]


def _statuses(transition: Transition) -> list[float]:
    unparsed = [] if transition.parse_error is None else [-1.0]
    return [*map(_signed, transition.tool_results), *unparsed]


def _signed(tool_result: ToolResult) -> float:
    return 1.0 if tool_result.status is ToolStatus.OK else -1.0
