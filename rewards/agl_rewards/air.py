"""AIR, automatic intermediate rewarding: tool results become rewards (Agent Lightning, arXiv 2508.03680).

The credit rule `air` counts a call's tool results in its advantage. The reward rule `tool_results` makes rewards of
single calls of them, which any credit rule then shares out. The capability check refuses both together, because a tool
result counts once. Adapters report tool results; without a report, the conversation's count
(`agl_core.learning.tool_results`).

A status is +1 (ok) or −1 (error, timeout, empty), and is compared with the mean of the *same tool* among the agent's
calls in the group. A tool that always succeeds therefore earns nothing: calling it would otherwise be the quickest way
to a reward. Tool calls that nothing could run count as one more tool, `malformed`: they do not parse, or name a tool
that the request did not offer. Every other call with a tool succeeds at it, so that an invented name hides no failure.

A comparison by name does not see that calls of one tool differ: a shell's easy commands are preferred to hard ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from statistics import mean
from typing import Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, model_validator

from agl_core import Capability, CreditKind
from agl_core.learning.tool_results import function_of, tool_calls_of
from agl_core.protocols import CreditRule, GroupRewardRule
from agl_core.types import Episode, Reward, ToolResult, ToolStatus, Transition
from agl_rewards.group_credit import episode_advantages

RULE = "tool_results"
MALFORMED = "malformed"
"""The tool that a call fails at if it does not parse, or asks for a tool that was not offered and does not work."""


class AirOptions(BaseModel):
    """Settings of `air`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    form: Literal["two-level", "mixed"] = "two-level"
    """two-level: the episode's advantage, and beside it that of each call's tools; mixed: the paper's formula."""
    beta: float = Field(0.3, ge=0, le=10)
    """β: the weight of a call's tools beside its episode, in standard deviations of the group's returns."""
    alpha: float = Field(0.2, ge=0, le=1)
    """α of the mixed form: the share of a call's own tool results."""

    def yields(self) -> CreditKind:
        return CreditKind.ADVANTAGE if self.form == "two-level" else CreditKind.RETURN

    def needs(self) -> Collection[Capability]:
        return {Capability.GROUPS} if self.form == "two-level" else ()

    @model_validator(mode="after")
    def _refuse_without_effect(self) -> Self:
        unused, form = ("alpha", "mixed") if self.form == "two-level" else ("beta", "two-level")
        if unused in self.model_fields_set and getattr(self, unused) != type(self).model_fields[unused].default:
            raise ValueError(f"'{unused}' has no effect here: it belongs to form = \"{form}\".")
        return self


def air(options: AirOptions) -> CreditRule:
    """A call's advantage is its rollout's, and β times how much better its tools did than they do in the group.

        A_t = z + β · Σ over the tools of t of (its status − its mean over the agent's calls in the group)

    z is the episode's advantage (`agl_rewards.group_credit`), 0 without contrast. The mixed form is the paper's: the
    return α · status_t + (1 − α) · R, of the mean status of t and the terminal reward R; R alone for a call without
    tool results. It prefers a tool that always succeeds to a reward that is rare (docs/choosing.md).

    Conserves: β = 0 is `identical`. Over a group the terms of each tool sum to 0, so that a tool with one status
    everywhere contributes nothing, and they do not depend on other tools. Without contrast |A| is at most 2 · β for
    each tool that the call asks for. The choices of a call (`n` > 1) share its place in means and sums.
    """
    if options.form == "mixed":
        return partial(_mixed, alpha=options.alpha)
    return partial(_two_level, beta=options.beta)


def _two_level(episodes: Sequence[Episode], beta: float) -> list[list[float]]:
    return [
        [z + beta * sum(terms.values()) for terms in of_episode]
        for z, of_episode in zip(episode_advantages(episodes), tool_terms(episodes), strict=True)
    ]


def _mixed(episodes: Sequence[Episode], alpha: float) -> list[list[float]]:
    return [
        [
            alpha * mean(statuses) + (1 - alpha) * (episode.terminal or 0.0) if statuses else episode.terminal or 0.0
            for statuses in map(_statuses, episode.transitions)
        ]
        for episode in episodes
    ]


class ToolResultsOptions(BaseModel):
    """Settings of `tool_results`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    default_weight: float = Field(0.2, ge=0, description="w of a tool that `weights` does not name.")
    weights: dict[str, NonNegativeFloat] = Field({}, description="w by tool name.")


def tool_results(options: ToolResultsOptions, _: object) -> GroupRewardRule:
    """Each call is rewarded for its tools: w · (status − the mean status of that tool in the group).

        [rewards.tool_results]
        weights = { memory = 0.30, search = 0.20 }        # any other tool: default_weight = 0.2

    The rewards have the tools' names, and belong to the call that asked for them; a tool at its mean has none. Over a
    group they sum to 0, the choices of a call (`n` > 1) sharing its place.
    """

    def reward_calls(episodes: Sequence[Episode]) -> list[list[Reward]]:
        return [
            [
                Reward(*t.key[:2], tool, options.weights.get(tool, options.default_weight) * term, RULE, *t.key[2:])
                for t, terms in zip(episode.transitions, of_episode, strict=True)
                for tool, term in terms.items()
                if term
            ]
            for episode, of_episode in zip(episodes, tool_terms(episodes), strict=True)
        ]

    return GroupRewardRule(reward_calls)


def tool_terms(episodes: Sequence[Episode]) -> list[list[dict[str, float]]]:
    """For each transition and each tool that it asked for: its mean status minus that of the tool in the group.

    The mean is over calls of the same agent and policy, the choices of a call (`n` > 1) sharing its place.
    """
    choices = Counter((i, t.turn) for i, episode in enumerate(episodes) for t in episode.transitions)
    statuses = [[_by_tool(transition) for transition in episode.transitions] for episode in episodes]
    totals, counts = defaultdict[_Tool, float](float), defaultdict[_Tool, float](float)
    for i, episode in enumerate(episodes):
        for transition, of_call in zip(episode.transitions, statuses[i], strict=True):
            for tool, status in of_call.items():
                share = 1 / choices[i, transition.turn]
                totals[tool] += share * status
                counts[tool] += share
    return [
        [{tool[-1]: status - totals[tool] / counts[tool] for tool, status in of_call.items()} for of_call in of_episode]
        for of_episode in statuses
    ]


_Tool: TypeAlias = tuple[str, str | None, str]
"""A tool of one policy and agent: they are compared with themselves."""


def _by_tool(transition: Transition) -> dict[_Tool, float]:
    """The mean status of each tool that a call asked for, and of `MALFORMED`, if it asked for any."""
    statuses = defaultdict[str, list[float]](list)
    invented, is_malformed = _invented(transition), transition.parse_error is not None
    for tool_result in transition.tool_results:
        if tool_result.tool_call_id in invented and tool_result.status is not ToolStatus.OK:
            is_malformed = True
        else:
            statuses[tool_result.tool].append(_signed(tool_result))
    if statuses or is_malformed:
        statuses[MALFORMED].append(-1.0 if is_malformed else 1.0)
    return {(transition.policy, transition.agent, tool): mean(of_tool) for tool, of_tool in statuses.items()}


def _invented(transition: Transition) -> set[str]:
    """The ids of the tool calls of a response whose tools the request did not offer; none if it offered no tool."""
    offered = {function_of(tool)[0] for tool in transition.tools}
    return {c["id"] for c in tool_calls_of(transition.response) if offered and function_of(c)[0] not in offered}


def _statuses(transition: Transition) -> list[float]:
    unparsed = [] if transition.parse_error is None else [-1.0]
    return [*map(_signed, transition.tool_results), *unparsed]


def _signed(tool_result: ToolResult) -> float:
    return 1.0 if tool_result.status is ToolStatus.OK else -1.0
