"""AIR, automatic intermediate rewarding: what the tools did becomes reward (Agent Lightning, arXiv 2508.03680).

It comes in two forms, which the capability check does not allow together, for an outcome counts once: the reward rule
`tool_outcomes` adds rewards of single calls, which any credit rule then shares out; the credit rule `air` mixes a
call's outcomes with the rollout's return. Both count a response whose own tool calls did not parse as one failure.
Outcomes are those that adapters report, else those that the conversation tells (`agl_core.learning.outcomes`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat

from agl_core import Need, credit_rule
from agl_core.learning import episode_return
from agl_core.types import Episode, Json, Outcome, OutcomeStatus, Reward, Transition
from agl_rewards.functions import FunctionName, load_function

OutcomeRule: TypeAlias = Callable[[Outcome], float | bool | None]
"""Judges one outcome: True or False, a number between (1 full success, −1 full failure), or None: no reward.

What the tool returned is structured, wherever the outcome comes from: `result` as `structured` makes it.
"""


@credit_rule(kind=Need.RETURNS, provides={Need.OUTCOMES})
def air(
    episodes: Sequence[Episode],
    *,
    alpha: Annotated[float, Field(ge=0, le=1, description="α: the share of a call's own outcomes.")] = 0.2,
) -> list[list[float]]:
    """A call's value mixes what its tools did with the return: r_t = α · status_t + (1 − α) · R.

    status_t is the mean over the outcomes of t of +1 (ok) and −1 (error, timeout, empty); a transition without
    outcomes gets R, the episode's return (arXiv 2508.03680, automatic intermediate rewarding). The values are returns:
    R is in each of them already.

    Conserves: α = 0, or no outcome, is `identical`; the value lies between status_t and R, and where α < 1 more R is
    always more value.
    """
    return [_mixed(episode, alpha) for episode in episodes]


class ToolOutcomesOptions(BaseModel):
    """Settings of `tool_outcomes`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    default_weight: float = Field(0.2, ge=0, description="w of a tool that `weights` does not name.")
    weights: dict[str, NonNegativeFloat] = Field({}, description="w by tool name.")
    rules: dict[str, FunctionName] = Field(
        {}, description="Your own judgement by tool name: 'module:function', called with the outcome."
    )

    def functions(self) -> dict[str, OutcomeRule]:
        """The functions that `rules` names, by tool; ConfigError if one is not there."""
        return {tool: load_function(name, f"reward 'tool_outcomes': rules.{tool}") for tool, name in self.rules.items()}


def functions_needed(options: ToolOutcomesOptions) -> frozenset[Need]:
    """Nothing of the run's other parts; but its functions must be there, which is asked before anything starts."""
    options.functions()
    return frozenset()


def tool_outcomes(options: ToolOutcomesOptions) -> Callable[[Episode], list[Reward]]:
    """Each call is rewarded for what its tools did: +w if ok, −w on error, timeout or an empty result.

        [rewards.tool_outcomes]
        weights = { memory = 0.30, search = 0.20 }        # any other tool: default_weight = 0.2
        rules = { fetch = "my_rules:http_ok" }

    A rule replaces ±1 for its tool; w still multiplies it. It gets the outcome with a structured `result` (see
    `structured`), so that it need not care whether a framework made JSON text of what the tool returned:

        def http_ok(outcome: Outcome) -> bool:
            match outcome.result:
                case {"status": int(code)} if code >= 400:
                    return False
            return outcome.status == "ok"

    The rewards are named `tool.place.status`, and belong to the call that asked for the tool (arXiv 2508.03680).
    """
    rules = options.functions()

    def judged(transition: Transition) -> Iterator[tuple[str, float]]:
        for place, outcome in enumerate(transition.outcomes):
            rule = rules.get(outcome.tool)
            judgement = rule(replace(outcome, result=structured(outcome.result))) if rule else _succeeded(outcome)
            if judgement is not None:
                weight = options.weights.get(outcome.tool, options.default_weight)
                yield f"{outcome.tool}.{place}.{outcome.status}", weight * _signed(judgement)
        if transition.parse_error is not None:
            yield "unparsed", -options.default_weight

    def reward_calls(episode: Episode) -> list[Reward]:
        return [
            Reward(episode.rollout, episode.attempt, name, value, "tool_outcomes", t.key.call, t.key.choice)
            for t in episode.transitions
            for name, value in judged(t)
        ]

    return reward_calls


def structured(result: Json) -> Json:
    """What a tool returned, where it is the JSON text of an object or a list, or a message's text parts of one.

    Frameworks make text of what a tool returns (LangChain JSON, as OpenAI's `tool` messages need), adapters that see
    the tool itself do not. All else stays as it is: other text, a number in text, what was cut for its length.

    >>> structured('{"status": 404}'), structured([{"type": "text", "text": '["a"]'}]), structured({"status": 404})
    ({'status': 404}, ['a'], {'status': 404})
    >>> structured("2020"), structured("[sic]"), structured(None)
    ('2020', '[sic]', None)
    """
    text = _text(result)
    if text is None or not text.lstrip().startswith(("{", "[")):
        return result
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return result


def _text(result: Json) -> str | None:
    """A text, or that of a message's parts if all of them are text."""
    if isinstance(result, list) and result:
        parts = [part.get("text") for part in result if isinstance(part, Mapping) and part.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(result) else None
    return result if isinstance(result, str) else None


def _mixed(episode: Episode, alpha: float) -> list[float]:
    whole = episode_return(episode)
    statuses = [_statuses(transition) for transition in episode.transitions]
    return [alpha * mean(status) + (1 - alpha) * whole if status else whole for status in statuses]


def _statuses(transition: Transition) -> list[float]:
    unparsed = [] if transition.parse_error is None else [-1.0]
    return [_signed(_succeeded(outcome)) for outcome in transition.outcomes] + unparsed


def _succeeded(outcome: Outcome) -> bool:
    return outcome.status is OutcomeStatus.OK


def _signed(judgement: float | bool) -> float:
    return (1.0 if judgement else -1.0) if isinstance(judgement, bool) else float(judgement)
