"""One attempt in a worker: what the agent gets, how it ended, and the interface of what runs it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson

from agl_core.capture import ActiveAttempt, Recording
from agl_core.errors import last_frames
from agl_core.types import Ending, Json
from agl_core.wire.workers import MAX_DEPTH, MAX_RESULT, Assignment
from agl_core.worker.agent import AgentContext
from agl_core.worker.bounds import MAX_ERROR, bounded_text, depth_of

_NO_PROXY = ("no_proxy", "NO_PROXY")
OTHER_KEY = "ANTHROPIC_AUTH_TOKEN"
"""A second key beside ANTHROPIC_API_KEY, which some clients refuse; it would be the user's own."""
PLACEHOLDER_KEY = "agl"
"""The key of a client that is made outside any attempt; each of its requests gets the key of its attempt."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended, as the worker saw it."""

    ending: Ending
    result: Json = None
    error: str | None = None


class Runner(Protocol):
    """Runs attempts of one agent, in one way. All methods belong to the worker's event loop."""

    @property
    def abandoned(self) -> int:
        """Attempts that could not be ended; what they do later does not count."""
        ...

    @property
    def at_once(self) -> int:
        """How many attempts run at the same time, unless the configuration says otherwise."""
        ...

    async def start(self) -> None:
        """Get ready for the first attempt."""

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> Ended:
        """Run one attempt to its end.

        When this is cancelled, nothing of the attempt is left running; if it has ended already, its end is returned.
        """
        ...

    async def close(self) -> None:
        """Release what `start` took; no attempt is running any more."""


def finished(result: Any) -> Ended:
    """The end of an agent that returned `result`: a crash if that is not JSON, or more than a report can carry."""
    try:
        encoded = orjson.dumps(result)
    except TypeError as error:
        problem = f"what is not JSON ({error}); return a string, number, list or dict"
        if "recursion limit" in str(error).lower():
            problem = f"arrays or objects nested more than {MAX_DEPTH} deep, which is the limit; return less"
        return Ended(Ending.CRASHED, error=f"the agent returned {problem}")
    if isinstance(result, float) and encoded == b"null":
        return Ended(Ending.CRASHED, error="the agent returned a number that is not finite")
    if (size := len(encoded)) > MAX_RESULT:
        problem = f"the agent returned {size} bytes of JSON, and {MAX_RESULT} are the limit; return less"
        return Ended(Ending.CRASHED, error=problem)
    returned = orjson.loads(encoded)
    if (depth := depth_of(returned)) > MAX_DEPTH:
        problem = f"the agent returned JSON nested {depth} deep, and {MAX_DEPTH} is the limit; return less"
        return Ended(Ending.CRASHED, error=problem)
    return Ended(Ending.FINISHED, returned)


def crashed(error: BaseException) -> Ended:
    """The end of an agent that raised: the error, where it was raised, and the end of its traceback."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(last[0].filename)}:{last[0].lineno})" if last else ""
    try:
        said = str(error)
    except Exception as failure:
        said = f"(its message cannot be read: {type(failure).__name__})"
    said = bounded_text(f"{type(error).__name__}: {said}", MAX_ERROR // 2)
    return Ended(Ending.CRASHED, error=f"{said}{where}\n{last_frames(error)}".rstrip())


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
