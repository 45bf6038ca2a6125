"""Decorators that make a plugin of one function.

    import agl_core

    @agl_core.reward_rule
    def brevity(episode, *, limit: int = 200):
        \"\"\"1 if the answer is short.\"\"\"
        return float(len(str(episode.result)) <= limit)

Name the file in the configuration (`plugins = ["my_rewards.py"]`) and the rule beside it (`[rewards.brevity]`).
Keyword-only parameters are its settings: `[rewards.brevity]` takes `limit`, checked against its type.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, create_model

from agl_core.hooks import hookimpl
from agl_core.plugins import Need, Register

Function = TypeVar("Function", bound=Callable[..., Any])


def options_of(function: Callable[..., Any]) -> type[BaseModel]:
    """The settings of a function: its keyword-only parameters, their annotations and defaults."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {
        parameter.name: (
            hints.get(parameter.name, Any),
            Field(... if parameter.default is inspect.Parameter.empty else parameter.default),
        )
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    return create_model(f"{function.__name__}_options", __config__=ConfigDict(extra="forbid"), **fields)


class _Rule:
    """A plugin that brings one function."""

    def __init__(
        self, function: Callable[..., Any], name: str, needs: Iterable[Need] = (), provides: Iterable[Need] = ()
    ) -> None:
        self.function, self.name = function, name
        self.needs, self.provides = frozenset(needs), frozenset(provides)

    def register_with(self, register: Register) -> None:
        register(
            self.name,
            lambda options: functools.partial(self.function, **options.model_dump()),
            options=options_of(self.function),
            needs=self.needs,
            provides=self.provides,
            doc=inspect.getdoc(self.function),
        )


class _RewardRule(_Rule):
    @hookimpl
    def register_rewards(self, register: Register) -> None:
        self.register_with(register)


class _CreditRule(_Rule):
    @hookimpl
    def register_credit_rules(self, register: Register) -> None:
        self.register_with(register)


@overload
def reward_rule(function: Function) -> Function: ...
@overload
def reward_rule(*, name: str) -> Callable[[Function], Function]: ...
def reward_rule(function: Any = None, *, name: str | None = None) -> Any:
    """Make `function(episode, *, settings…) -> float | {component: float} | None` a reward rule.

    It may be async. None means that it has nothing to say about this episode.
    """

    def decorate(function: Function) -> Function:
        function.__agl_plugin__ = _RewardRule(function, name or function.__name__)  # type: ignore[attr-defined]
        return function

    return decorate if function is None else decorate(function)


def credit_rule(
    *, kind: Need | Collection[Need], name: str | None = None, needs: Iterable[Need] = (), provides: Iterable[Need] = ()
) -> Callable[[Function], Function]:
    """Make `function(episodes, *, settings…) -> list[list[float]]` a credit rule.

    It gets one group of episodes and yields one value per transition. `kind` says what the values are:
    `Need.RETURNS` or `Need.REWARDS`, or both where the algorithm may read them as either. `needs` is what it needs of
    the rest of the run (`Need.GROUPS`, say), `provides` what it brings besides (`Need.OUTCOMES` if tool outcomes count
    in its values).
    """

    def decorate(function: Function) -> Function:
        kinds = {kind} if isinstance(kind, Need) else {*kind}
        rule = _CreditRule(function, name or function.__name__, needs, {*kinds, *provides})
        function.__agl_plugin__ = rule  # type: ignore[attr-defined]
        return function

    return decorate
