"""Who makes a call: each run of an agent, also of one that another agent manages."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Generator
from typing import Any

from smolagents import MultiStepAgent

from agl_core.capture import current_attempt, current_identity, report_problem
from agl_core.capture.attach.methods import wrap_once
from agl_core.capture.marking import AgentRun
from agl_smolagents import tools


def watch_agents() -> None:
    """Wrap `MultiStepAgent.run`; calling it again changes nothing."""
    wrap_once(MultiStepAgent, "run", _named)


def _named(run: Callable[..., Any]) -> Callable[..., Any]:
    def named_run(agent: MultiStepAgent, *args: Any, **kwargs: Any) -> Any:
        if current_attempt() is None:
            return run(agent, *args, **kwargs)
        try:
            tools.watch_parts(agent)
        except Exception as error:
            report_problem(f"Watching the model and the executor of {agent!r}", error)
        # A stream's agent goes on between two items; what it sets there must not reach the code that reads it.
        context = contextvars.copy_context()
        here = AgentRun(_name_of(agent))
        context.run(here.start, lambda: None)
        try:
            result = context.run(run, agent, *args, **kwargs)
        except BaseException as error:
            context.run(here.end, error)
            raise
        if isinstance(result, Generator):
            return _items(result, context, here)
        context.run(here.end, None)
        return result

    return named_run


def _items(source: Generator[Any, Any, Any], context: contextvars.Context, here: AgentRun) -> Generator[Any, Any, Any]:
    try:
        while True:
            try:
                item = context.run(next, source)
            except StopIteration as end:
                return end.value
            yield item
    finally:
        context.run(source.close)
        context.run(here.end, None)


def _name_of(agent: MultiStepAgent) -> str:
    """The name that the user gave; else that of the code around it; else smolagents' own, the name of its class."""
    around = current_identity()
    return str(agent.name or (around and around.agent) or type(agent).__name__)
