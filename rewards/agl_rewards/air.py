"""AIR, automatic intermediate rewarding: tool results become rewards (Agent Lightning, arXiv 2508.03680).

It has two forms. The reward rule `tool_results` adds rewards of single calls, which any credit rule then shares out.
The credit rule `air` mixes a call's tool results with the rollout's terminal reward. The capability check refuses both
together, because a tool result counts once. Both count a response whose own tool calls did not parse as one failure.
Tool results are those that adapters report, else those of the conversation (`agl_core.learning.tool_results`).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeFloat

from agl_core import Capability, CreditKind, credit_rule, episode_return
from agl_core.errors import ConfigError
from agl_core.types import Episode, Json, Reward, ToolResult, ToolStatus, Transition


def _is_name(entry: str) -> str:
    module, _, function = entry.partition(":")
    if not module or not function:
        raise ValueError("must be 'module:function', for instance 'my_rules:http_ok'")
    return entry


FunctionName: TypeAlias = Annotated[str, AfterValidator(_is_name)]
"""A setting that names a function; `load_function` checks whether it exists."""


def load_function(entry: str, setting: str) -> Callable[..., Any]:
    """The function that `setting` names; ConfigError if there is none.

    >>> load_function("math:sqrt", "rules.root")(9)
    3.0
    """
    module_name, _, name = entry.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(
            f"{setting} = '{entry}' cannot be imported ({type(error).__name__}: {error}). It must be "
            f"'module:function'; a module beside the configuration is found if `plugins` names a file there."
        ) from error
    if not callable(found):
        raise ConfigError(f"{setting} = '{entry}' is a {type(found).__name__}, not a function.")
    return found  # type: ignore[no-any-return]


ToolResultRule: TypeAlias = Callable[[ToolResult], float | bool | None]
"""Scores one tool result: True or False, a number between (1 full success, −1 full failure), or None: no reward.

`result` is parsed by `structured`, whatever the source of the tool result.
"""


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
    of_rollout = _terminal if reward == "terminal" else episode_return
    return [_mixed(episode, alpha, of_rollout(episode)) for episode in episodes]


class ToolResultsOptions(BaseModel):
    """Settings of `tool_results`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    default_weight: float = Field(0.2, ge=0, description="w of a tool that `weights` does not name.")
    weights: dict[str, NonNegativeFloat] = Field({}, description="w by tool name.")
    rules: dict[str, FunctionName] = Field(
        {}, description="Your own scoring by tool name: 'module:function', called with the tool result."
    )

    def functions(self) -> dict[str, ToolResultRule]:
        """The functions that `rules` names, by tool; ConfigError if one is not there."""
        return {tool: load_function(name, f"reward 'tool_results': rules.{tool}") for tool, name in self.rules.items()}


def functions_needed(options: ToolResultsOptions) -> frozenset[Capability]:
    """It needs no capability, but its functions must exist, which is checked before anything starts."""
    options.functions()
    return frozenset()


def tool_results(options: ToolResultsOptions) -> Callable[[Episode], list[Reward]]:
    """Each call is rewarded for its tool results: +w if ok, −w on error, timeout or an empty result.

        [rewards.tool_results]
        weights = { memory = 0.30, search = 0.20 }        # any other tool: default_weight = 0.2
        rules = { fetch = "my_rules:http_ok" }

    A rule replaces ±1 for its tool; w still multiplies it. It gets the tool result with a parsed `result` (see
    `structured`), whether or not a framework made JSON text of what the tool returned:

        def http_ok(tool_result: ToolResult) -> bool:
            match tool_result.result:
                case {"status": int(code)} if code >= 400:
                    return False
            return tool_result.status == "ok"

    The rewards are named `tool.place.status`, and belong to the call that asked for the tool (arXiv 2508.03680).
    """
    rules = options.functions()

    def rewards_of(transition: Transition) -> Iterator[tuple[str, float]]:
        for place, tool_result in enumerate(transition.tool_results):
            rule = rules.get(tool_result.tool)
            verdict = (
                rule(replace(tool_result, result=structured(tool_result.result))) if rule else _succeeded(tool_result)
            )
            if verdict is not None:
                weight = options.weights.get(tool_result.tool, options.default_weight)
                yield f"{tool_result.tool}.{place}.{tool_result.status}", weight * _signed(verdict)
        if transition.parse_error is not None:
            yield "unparsed", -options.default_weight

    def reward_calls(episode: Episode) -> list[Reward]:
        return [
            Reward(episode.rollout, episode.attempt, name, value, "tool_results", t.key.call, t.key.choice)
            for t in episode.transitions
            for name, value in rewards_of(t)
        ]

    return reward_calls


def structured(result: Json) -> Json:
    """A tool's result, parsed if it is the JSON text of an object or a list, or a message's text parts of one.

    Frameworks make text of what a tool returns (LangChain makes JSON, as OpenAI's `tool` messages need); adapters that
    see the tool itself do not. Everything else is unchanged: other text, a number in text, text that was cut for its
    length.

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


def _terminal(episode: Episode) -> float:
    return episode.terminal or 0.0


def _mixed(episode: Episode, alpha: float, whole: float) -> list[float]:
    statuses = [_statuses(transition) for transition in episode.transitions]
    return [alpha * mean(status) + (1 - alpha) * whole if status else whole for status in statuses]


def _statuses(transition: Transition) -> list[float]:
    unparsed = [] if transition.parse_error is None else [-1.0]
    return [_signed(_succeeded(tool_result)) for tool_result in transition.tool_results] + unparsed


def _succeeded(tool_result: ToolResult) -> bool:
    return tool_result.status is ToolStatus.OK


def _signed(verdict: float | bool) -> float:
    return (1.0 if verdict else -1.0) if isinstance(verdict, bool) else float(verdict)
