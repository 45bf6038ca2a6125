"""The user's agent: a callable named `module:function`, sync or async, called with a task's input."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_core.errors import AgentError, last_frames
from agl_core.plugins import add_to_path
from agl_core.types import Json, Mode


@dataclass(frozen=True, slots=True)
class AgentContext:
    """What an agent gets if it has a parameter named `context`; most agents need none of it."""

    task_id: str
    split: str
    rollout: str
    attempt: int
    mode: Mode
    base_url: str
    """The attempt's own OpenAI-compatible base URL, ending in /v1, for clients that cannot be reached otherwise."""
    api_key: str


@dataclass(frozen=True, slots=True)
class Agent:
    """A loaded agent."""

    entry: str
    function: Callable[..., Any]
    wants_context: bool
    is_async: bool

    def call(self, task_input: Json, context: AgentContext) -> Any:
        """Call it; an async agent gives an awaitable."""
        return self.function(task_input, context=context) if self.wants_context else self.function(task_input)


def load_agent(entry: str, folder: Path | None = None) -> Agent:
    """Import `module:function`; modules beside the configuration file (`folder`) are found too.

    AgentError if that fails, or if what is found cannot be called with a task's input.
    """
    module_name, _, function_name = entry.partition(":")
    if folder is not None:
        add_to_path(folder)
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        where = "Looked beside the configuration file and in the environment."
        if not (isinstance(error, ModuleNotFoundError) and module_name.startswith(error.name or "?")):
            where = f"It was found, and this is where it fails:\n{last_frames(error)}"
        raise AgentError(
            f"agent.entry = '{entry}': the module '{module_name}' cannot be imported "
            f"({type(error).__name__}: {error}). {where}"
        ) from error
    for part in function_name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise AgentError(f"agent.entry = '{entry}': the module '{module_name}' has no '{function_name}'.")
    if not callable(found):
        raise AgentError(f"agent.entry = '{entry}' is a {type(found).__name__}, not a callable.")
    is_async = inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None))  # noqa: B004
    return Agent(entry, found, _wants_context(entry, found), is_async)


def _wants_context(entry: str, function: Callable[..., Any]) -> bool:
    """Whether it has a parameter for the context; AgentError if a call with a task's input would fail."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # Some that are written in C do not say what they take.
        return False
    wants_context = "context" in signature.parameters
    try:
        signature.bind(None, **({"context": None} if wants_context else {}))
    except TypeError as error:
        raise AgentError(
            f"agent.entry = '{entry}' cannot be called with a task's input ({error}): it is {signature}. It has to "
            f"take the input as its first argument, and may take `context`; give other parameters a default."
        ) from error
    return wants_context
