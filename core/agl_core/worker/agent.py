"""The user's agent, a callable `module:function`: its context, its environment, and running it as a task."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from agl_core.capture import ActiveAttempt, Recording, running
from agl_core.errors import AgentError, last_frames
from agl_core.plugins import add_to_path
from agl_core.types import Ending, Json, Mode
from agl_core.wire.workers import Assignment
from agl_core.worker.report import Ended, crashed, finished

logger = logging.getLogger(__name__)

_CANCEL_GRACE = 2.0
"""Seconds an agent gets to end after it was cancelled."""
_MAX_BLOCKED = 2.0
"""Seconds that the event loop may stand still."""
_NO_PROXY = ("no_proxy", "NO_PROXY")
OTHER_KEY = "ANTHROPIC_AUTH_TOKEN"
"""A second key beside ANTHROPIC_API_KEY, which some clients refuse; it would be the user's own."""
PLACEHOLDER_KEY = "agl"
"""The key of a client that is made outside any attempt; each of its requests gets the key of its attempt."""


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


def active_attempt(assignment: Assignment, base_url: str, recording: Recording) -> ActiveAttempt:
    """The attempt that the context of its code carries."""
    return ActiveAttempt(assignment.rollout, assignment.attempt, base_url, assignment.key, recording)


def agent_context(assignment: Assignment, base_url: str) -> AgentContext:
    return AgentContext(
        task_id=assignment.task_id,
        split=assignment.task_split,
        rollout=assignment.rollout,
        attempt=assignment.attempt,
        mode=assignment.mode,
        base_url=f"{base_url}{assignment.path}/v1",
        api_key=assignment.key,
    )


def client_variables(base_url: str, key: str = PLACEHOLDER_KEY) -> dict[str, str]:
    """The variables that send an unmodified agent's LLM client to `base_url`, the server's or an attempt's own.

    A proxy that the environment names is not used for the server.

    >>> client_variables("http://127.0.0.1:8000")["OPENAI_BASE_URL"]
    'http://127.0.0.1:8000/v1'
    """
    return {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_BASE": f"{base_url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": key,
        **dict.fromkeys(_NO_PROXY, _without_proxy(urlsplit(base_url).hostname or "")),
    }


def _without_proxy(host: str) -> str:
    """The hosts that no proxy is used for: those that the environment names, and this one."""
    named = ",".join(os.environ.get(name, "") for name in _NO_PROXY).split(",")
    hosts = dict.fromkeys(each.strip() for each in (*named, host) if each.strip())
    return "*" if "*" in hosts else ",".join(hosts)


def attempt_variables(assignment: Assignment, base_url: str) -> dict[str, str]:
    """The environment of a process that runs this attempt and no other."""
    return {
        **client_variables(f"{base_url}{assignment.path}", assignment.key),
        "AGL_TASK": orjson.dumps(assignment.task_input).decode(),
        "AGL_ROLLOUT": assignment.rollout,
        "AGL_ATTEMPT": str(assignment.attempt),
    }


@contextmanager
def agent_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process's environment has these variables, and no `OTHER_KEY`."""
    before = {name: os.environ.get(name) for name in (*variables, OTHER_KEY)}
    os.environ.update(variables)
    os.environ.pop(OTHER_KEY, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class TaskPerAttempt:
    """Runs attempts of an async agent in this process. Cheap, and nothing can be ended by force.

    A task that swallows its cancellation is abandoned when its time is up: it is counted in `abandoned`, and its later
    requests are refused. An agent that blocks keeps all others waiting, which is said once.
    """

    default_concurrency = 128

    def __init__(self, agent: Agent) -> None:
        self.abandoned = 0
        self._agent = agent
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> Ended:
        async def call() -> Any:
            return await self._agent.call(assignment.task_input, agent_context(assignment, base_url))

        with running(active_attempt(assignment, base_url, recording)):
            task = asyncio.create_task(call())
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            if not task.done():
                await self._cancel(task)
                raise
        try:
            return finished(task.result())
        except asyncio.CancelledError:
            return Ended(Ending.CRASHED, error="the agent cancelled itself")
        except BaseException as error:
            return crashed(error)

    async def _cancel(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_GRACE)
        if not task.done():
            self.abandoned += 1
            logger.warning(
                "An agent did not end when cancelled and was abandoned (%d so far). [workers] isolation = 'process' "
                "ends such agents by force.",
                self.abandoned,
            )

    async def _watch(self) -> None:
        """Say once that the event loop stood still; the CPU time tells an agent that blocks from a busy machine."""
        while True:
            before, used = time.monotonic(), time.process_time()
            await asyncio.sleep(_MAX_BLOCKED / 4)
            blocked = time.monotonic() - before
            if blocked > _MAX_BLOCKED:
                logger.warning(
                    "The agent blocked the worker's event loop for %.0f s (%.1f s of CPU time), and with it all other "
                    "attempts. Give each attempt a process of its own: set [workers] isolation = 'process'.",
                    blocked,
                    time.process_time() - used,
                )
                return
