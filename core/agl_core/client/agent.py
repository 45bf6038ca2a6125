"""The user's agent, a callable `module:function`: its environment, an attempt as a task, and the report of its end."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import orjson

from agl_core.capture import AttemptContext, Recording, running
from agl_core.capture.reports import PROMPTS
from agl_core.errors import AgentError, last_frames, nearest
from agl_core.plugins import add_to_path
from agl_core.types import Ending, Json, Mode, ToolResult
from agl_core.types.forms import count_values, dump_json, jsonable, text_of, without_halves
from agl_core.wire import MAX_BODY, MAX_DEPTH, MAX_REPORTS, MAX_RESULT, MAX_VALUES, Assignment, CloseRequest

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
_MAX_VALUE, _MIN_VALUE = 1 << 20, 64
"""Characters of a tool result's value in a report that has to be cut: at first, and at least."""
_MAX_ERROR = 64 << 10
_MAX_NAME = 1024
"""Characters of an id or a name in such a report."""
_NAMES = ("id", "tool", "tool_call_id", "agent", "span", "parent_span", "adapter", "status_rule")
_VALUES = ("arguments", "result", "error")


@dataclass(frozen=True, slots=True)
class AgentContext:
    """The value of an agent's parameter named `context`; most agents need none."""

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
    entry: str
    function: Callable[..., Any]
    wants_context: bool
    is_async: bool

    def call(self, assignment: Assignment, base_url: str) -> Any:
        """Call it on an attempt's task; an async agent gives an awaitable."""
        if not self.wants_context:
            return self.function(assignment.task_input)
        context = AgentContext(
            task_id=assignment.task_id,
            split=assignment.task_split,
            rollout=assignment.rollout,
            attempt=assignment.attempt,
            mode=assignment.mode,
            base_url=f"{base_url}{assignment.path}/v1",
            api_key=assignment.key,
        )
        return self.function(assignment.task_input, context=context)


def load_module(name: str, folder: Path | None, where: str) -> ModuleType:
    """Import a module; those in `folder` are found too. AgentError, which says `where` it is named, if that fails."""
    if folder is not None:
        add_to_path(folder)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        how = "Looked beside the configuration file and in the environment."
        if files := [file.stem for file in (folder or Path()).glob("*.py")]:
            how += f" {nearest(name, files)}"
        if not (isinstance(error, ModuleNotFoundError) and name.startswith(error.name or "?")):
            how = f"It was found, and this is where it fails:\n{last_frames(error)}"
        raise AgentError(
            f"{where}: the module '{name}' cannot be imported ({type(error).__name__}: {error}). {how}"
        ) from error


def load_agent(entry: str, folder: Path | None = None) -> Agent:
    """Import `module:function`, also from `folder`; AgentError if it is not there, or takes no task's input."""
    module_name, _, function_name = entry.partition(":")
    function: Any = load_module(module_name, folder, f"agent.entry = '{entry}'")
    for part in function_name.split("."):
        owner, function = function, getattr(function, part, None)
        if function is None:
            own = [name for name, value in vars(owner).items() if getattr(value, "__module__", None) == module_name]
            raise AgentError(
                f"agent.entry = '{entry}': the module '{module_name}' has no '{function_name}'. {nearest(part, own)}"
            )
    if not callable(function):
        raise AgentError(f"agent.entry = '{entry}' is a {type(function).__name__}, not a callable.")
    call = getattr(function, "__call__", None)  # noqa: B004  An object's own: it may be async.
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    return Agent(entry, function, _wants_context(entry, function), is_async)


def _wants_context(entry: str, function: Callable[..., Any]) -> bool:
    """True if it has a parameter for the context. AgentError if a call with a task's input would fail."""
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


def active_attempt(assignment: Assignment, base_url: str, recording: Recording) -> AttemptContext:
    return AttemptContext(
        assignment.rollout, assignment.attempt, base_url, assignment.key, recording, prompts=assignment.prompts
    )


def client_variables(base_url: str, key: str = PLACEHOLDER_KEY) -> dict[str, str]:
    """The variables that send an unmodified agent's LLM client to `base_url`, without a proxy.

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
    """The hosts that no proxy is used for: this one, and those in the environment."""
    named = ",".join(os.environ.get(name, "") for name in _NO_PROXY).split(",")
    hosts = dict.fromkeys(name.strip() for name in (*named, host) if name.strip())
    return "*" if "*" in hosts else ",".join(hosts)


def attempt_variables(assignment: Assignment, base_url: str) -> dict[str, str]:
    """The environment of a process that runs this attempt and no other."""
    return {
        **client_variables(f"{base_url}{assignment.path}", assignment.key),
        "AGL_TASK": orjson.dumps(assignment.task_input).decode(),
        "AGL_ROLLOUT": assignment.rollout,
        "AGL_ATTEMPT": str(assignment.attempt),
        **({PROMPTS: orjson.dumps(assignment.prompts).decode()} if assignment.prompts else {}),
    }


@contextmanager
def agent_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process's environment has these variables, and no `OTHER_KEY`."""
    changed = (*variables, OTHER_KEY)
    before = {name: os.environ[name] for name in changed if name in os.environ}
    os.environ.update(variables)
    os.environ.pop(OTHER_KEY, None)
    try:
        yield
    finally:
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update(before)


class TaskPerAttempt:
    """Runs attempts of an async agent as tasks in this process: cheap, and nothing can be ended by force.

    A task that swallows its cancellation is abandoned, with a warning, and its later requests are refused. An agent
    that blocks keeps all others waiting, which is said once.
    """

    default_concurrency = 128

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> AttemptEnd:
        async def call() -> Any:
            return await self._agent.call(assignment, base_url)

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
            return AttemptEnd(Ending.CRASHED, error="the agent cancelled itself")
        except BaseException as error:
            return crashed(error)

    async def _cancel(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_GRACE)
        if not task.done():
            logger.warning(
                "An agent did not end when cancelled and was abandoned. [workers] isolation = 'process' ends such "
                "agents by force."
            )

    async def _watch(self) -> None:
        """Say once that an agent kept the event loop; the time that a busy machine took from it does not count."""
        while True:
            before, waited = time.monotonic(), _seconds_without_cpu()
            await asyncio.sleep(_MAX_BLOCKED / 4)
            blocked = time.monotonic() - before - (_seconds_without_cpu() - waited)
            if blocked > _MAX_BLOCKED:
                logger.warning(
                    "The agent blocked the worker's event loop for %.0f s, and with it all other attempts. Give each "
                    "attempt a process of its own: set [workers] isolation = 'process'.",
                    blocked,
                )
                return


def _seconds_without_cpu() -> float:
    """Seconds for which this thread was ready to run and others had the CPU; 0 where the system does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, LookupError):
        return 0.0


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    ending: Ending
    result: Json = None
    error: str | None = None


def finished(result: Any) -> AttemptEnd:
    """The end of an agent that returned `result`: a crash if that is not JSON, or more than a report can carry."""
    try:
        encoded = without_halves(dump_json(result)).encode()
        returned = orjson.loads(encoded)
    except ValueError as error:
        problem = f"what is not JSON ({error.__cause__ or error}); return a string, number, list or dict"
    else:
        depth = depth_of(returned)
        if isinstance(result, float) and returned is None:
            problem = "a number that is not finite"
        elif len(encoded) > MAX_RESULT:
            problem = f"{len(encoded)} bytes of JSON, and {MAX_RESULT} are the limit; return less"
        elif (values := count_values(encoded, MAX_VALUES // 2)) > MAX_VALUES // 2:
            problem = f"{values} JSON values, and {MAX_VALUES // 2} are the limit; return less"
        elif depth > MAX_DEPTH:
            problem = f"JSON nested {depth} deep, and {MAX_DEPTH} is the limit; return less"
        else:
            return AttemptEnd(Ending.FINISHED, returned)
    return AttemptEnd(Ending.CRASHED, error=f"the agent returned {problem}")


def crashed(error: BaseException) -> AttemptEnd:
    """The end of an agent that raised: the error, where it was raised, and the end of its traceback."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(last[0].filename)}:{last[0].lineno})" if last else ""
    message = jsonable(f"{type(error).__name__}: {text_of(error)}", _MAX_ERROR // 2)
    return AttemptEnd(Ending.CRASHED, error=f"{message}{where}\n{last_frames(error)}".rstrip())


def closing(ended: AttemptEnd, recording: Recording) -> CloseRequest:
    """The report of an attempt's end, which is a crash if the result is too large or too deep.

    Long values of tool results are cut until the server takes the report; then the last reports are left out.
    """
    if ended.result is not None and (checked := finished(ended.result)).ending is not Ending.FINISHED:
        ended = checked
    tool_results, rewards = list(recording.tool_results), list(recording.rewards)
    request = CloseRequest(
        ending=ended.ending,
        result=ended.result,
        error=None if ended.error is None else str(jsonable(ended.error, _MAX_ERROR)),
        tool_results=tool_results[:MAX_REPORTS],
        rewards=rewards[:MAX_REPORTS],
        bypassed=recording.bypassed_calls,
    )
    limit = _MAX_VALUE
    while (request.tool_results or request.rewards) and not _can_be_taken(request):
        recording.problem(
            f"What an attempt reported of its tools and rewards was more than a report can carry "
            f"({MAX_BODY >> 20} MiB): the largest values were cut."
        )
        if limit >= _MIN_VALUE:
            results = [_shortened(tool_result, limit) for tool_result in request.tool_results]
            named = [reward.model_copy(update={"name": jsonable(reward.name, _MAX_NAME)}) for reward in request.rewards]
        else:
            results = request.tool_results[: len(request.tool_results) // 2]
            named = request.rewards[: len(request.rewards) // 2]
        request = request.model_copy(update={"tool_results": results, "rewards": named})
        limit //= 4
    if len(request.tool_results) < len(tool_results) or len(request.rewards) < len(rewards):
        recording.problem(
            "An attempt reported more tool results or rewards than a report can carry; only the first ones are kept."
        )
    return request


def _can_be_taken(request: CloseRequest) -> bool:
    """True if the server takes it, by the server's own check."""
    try:
        body = request.model_dump_json().encode()
        CloseRequest.model_validate_json(body)
    except ValueError:  # It is too deep, or has lone surrogates.
        return False
    return len(body) <= MAX_BODY and count_values(body, MAX_VALUES) <= MAX_VALUES


def _shortened(tool_result: ToolResult, limit: int) -> ToolResult:
    """The same with no name above `_MAX_NAME` and no value above `limit` characters; a value too deep is a text."""
    names = {name: jsonable(getattr(tool_result, name), _MAX_NAME) for name in _NAMES}
    values = {name: jsonable(getattr(tool_result, name), limit) for name in _VALUES}
    deep = {name: value for name, value in values.items() if depth_of(value) > MAX_DEPTH}
    as_text = {name: jsonable(orjson.dumps(value).decode(), limit) for name, value in deep.items()}
    return replace(tool_result, **{**names, **values, **as_text})


def depth_of(value: Json) -> int:
    """How deep arrays and objects are nested.

    >>> depth_of([1, {"a": []}]), depth_of("[[")
    (3, 0)
    """
    depth, level = 0, [value]
    while level := [node for node in level if isinstance(node, dict | list | tuple)]:
        depth += 1
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
    return depth
