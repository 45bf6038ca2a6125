"""The user's agent: a callable named `module:function`, sync or async, called with a task's input."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_core.errors import AgentError
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
    """Import `module:function`; modules beside the configuration file (`folder`) are found too."""
    module_name, _, function_name = entry.partition(":")
    if folder is not None and str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise AgentError(
            f"agent.entry = '{entry}': the module '{module_name}' cannot be imported "
            f"({type(error).__name__}: {error}). Looked beside the configuration file and in the environment."
        ) from error
    for part in function_name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise AgentError(f"agent.entry = '{entry}': the module '{module_name}' has no '{function_name}'.")
    if not callable(found):
        raise AgentError(f"agent.entry = '{entry}' is a {type(found).__name__}, not a callable.")
    parameters = inspect.signature(found).parameters
    is_async = inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None))  # noqa: B004
    return Agent(entry, found, "context" in parameters, is_async)
