"""The agent's semantic variables: the fields of the run's context object, as they are at each call."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

from agents.run_context import RunContextWrapper

from agl_core.capture import Identity, IdentityScope, current_attempt, enter_identity, jsonable, report_problem
from agl_core.capture.context import current_scope
from agl_core.types import Json

_asking: ContextVar[IdentityScope | None] = ContextVar("agl_openai_agents_asking", default=None)


def carries_context(ask: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wraps a function that asks the model: its requests carry the fields of the run's context."""

    async def asking(*args: Any, **kwargs: Any) -> Any:
        scope = _enter((*args, *kwargs.values()))
        try:
            return await ask(*args, **kwargs)
        finally:
            if scope is not None:
                scope.close()

    return asking


def has_answered() -> None:
    """The model has answered: later calls are those of tools."""
    scope = _asking.get()
    if scope is not None:
        scope.close()


def variables_of(context: Any) -> Mapping[str, Json] | None:
    """The fields of a context that has names for them: a mapping, dataclass or pydantic model; the public ones.

    >>> variables_of({"plan": ["search"], "_client": object()})
    {'plan': ['search']}
    """
    if isinstance(context, Mapping):
        fields = dict(context)
    elif dataclasses.is_dataclass(context) and not isinstance(context, type):
        fields = {each.name: getattr(context, each.name, None) for each in dataclasses.fields(context)}
    else:  # pydantic's names
        fields = {name: getattr(context, name) for name in getattr(type(context), "model_fields", ())}
    return {str(name): jsonable(value) for name, value in fields.items() if not str(name).startswith("_")}


def _enter(given: tuple[Any, ...]) -> IdentityScope | None:
    if current_attempt() is None:
        return None
    try:
        wrapper = next((each for each in given if isinstance(each, RunContextWrapper)), None)
        variables = variables_of(wrapper.context) if wrapper else None
    except Exception as error:
        report_problem("Reading the context of a run", error)
        return None
    if not variables:
        return None
    around = current_scope()
    scope = enter_identity(around.identity if around else Identity(), around.steps if around else None, variables)
    _asking.set(scope)
    return scope
