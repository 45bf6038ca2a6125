"""How adapters and agents report to the attempt that is running, from a command's processes too."""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import math
import os
import stat
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import orjson
from pydantic import ValidationError

from agl_core.capture.context import Recording, Report, current_attempt
from agl_core.capture.status import Outcome, status_of
from agl_core.errors import AgentError, describe_error, nearest
from agl_core.types import Identity, Source, ToolResult
from agl_core.types.forms import jsonable
from agl_core.wire import RewardReport

logger = logging.getLogger(__name__)

PROMPTS = "AGL_PROMPTS"
"""The environment variable that names a file of prompts. A command that runs as a rollout has their texts in it."""
MAX_SPOOL = 64 << 20
"""Bytes of the reports of a command's processes."""
_MIN_LINE = 1024
"""Bytes that a line counts for at least: many short ones take long too."""
_MAX_SPOOLS = 4096
"""Processes of a command whose reports are read."""

P = ParamSpec("P")
K = TypeVar("K")
V = TypeVar("V")


def reward(value: float, name: str = "reward", *, call: Any = None) -> None:
    """Report a reward that only the agent can know, any number of times; outside any rollout it does nothing.

    It is of the rollout, or of one `call`: the reply as the agent's client returned it, or the reply's id.
    AgentError if `value` is not a finite number, or the reply has no id.

    >>> reward(0.5, name="tests_passed")
    >>> reward(1, call="chatcmpl-7f3a")
    """
    given: Any = value
    try:
        number = math.nan if isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise AgentError(f"agl_core.reward('{name}'): {value!r} is not a finite number. Give it an int or a float.")
    # The `id` of a LangChain message may be that of its run.
    own = getattr(call, "response_metadata", {}).get("id") or getattr(call, "id", None)
    id = call if isinstance(call, str) else own
    if call is not None and not (id and isinstance(id, str)):
        raise AgentError(f"agl_core.reward('{name}', call=…): {call!r:.200} is neither a reply with an id nor an id.")
    active = current_attempt()
    if active is not None:
        active.recording.reward(RewardReport(name=name, value=number, call=id))


def prompt(name: str, default: str | None = None) -> str:
    """The text of a prompt by name: in a rollout that of the run or of a candidate, elsewhere that of a file.

    The variable AGL_PROMPTS names the file (such as `agl optimize` writes). `default` is for names that neither has.
    AgentError if there is no text at all, or the file cannot be read.

    >>> prompt("system", "Answer in one word.")
    'Answer in one word.'
    """
    active = current_attempt()
    texts = {**_texts(os.environ.get(PROMPTS, "")), **(active.prompts if active is not None else {})}
    text = texts.get(name, default)
    if text is None:
        raise AgentError(
            f"agl_core.prompt('{name}'): there is no such prompt. Give it a default, or name a file that has it in "
            f"{PROMPTS}. {nearest(name, texts)}"
        )
    if active is not None and texts and name not in texts:
        active.recording.problem(f"agl_core.prompt('{name}'): the run has no such prompt. {nearest(name, texts)}")
    return text


@functools.cache
def _texts(given: str) -> Mapping[str, str]:
    """The texts of a prompts file, by name; a command's environment has them themselves, as JSON."""
    if given.startswith("{"):
        texts: dict[str, str] = orjson.loads(given)
        return texts
    if not given:
        return {}
    try:
        prompts = tomllib.loads(Path(given).read_text(encoding="utf-8"))["prompts"]
        return {name: prompt["text"] for name, prompt in prompts.items() if "text" in prompt}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AgentError(
            f"{PROMPTS}: {given} is no file of prompts, which has tables [prompts.NAME] with a `text` "
            f"({type(error).__name__}: {error})."
        ) from error


def record_tool_result(
    id: str,
    tool: str,
    result: Any,
    who: Identity | None = None,
    *,
    decided: Outcome | None = None,
    tool_call_id: str | None = None,
    arguments: Any = None,
    started: float | None = None,
    adapter: str | None = None,
    recording: Recording | None = None,
) -> None:
    """Report, in bounded size, what a tool returned or the exception that it raised; outside any rollout do nothing.

    The tool has ended just now; `started` is in Unix seconds. `id` names this run of it: the same id is recorded once.
    `who` is the agent that asked for it, the run's own span, and the span around it. The result decides the status,
    unless `decided` does. If several adapters saw one tool call, one `adapter` counts. `recording` is by default the
    current attempt's.

    >>> recording = Recording()
    >>> record_tool_result("1", "search", ["a", "b"], recording=recording)
    >>> recording.tool_results[0].status
    <ToolStatus.OK: 'ok'>
    """
    if recording is None:
        active = current_attempt()
        if active is None:
            return
        recording = active.recording
    raised, who = isinstance(result, BaseException), who or Identity()
    status, rule = decided or status_of(result)
    report = ToolResult(
        id=id,
        rollout="",
        attempt=0,
        tool=tool,
        status=status,
        tool_call_id=tool_call_id,
        arguments=jsonable(arguments),
        result=None if raised else jsonable(result),
        error=describe_error(result) if raised else None,
        agent=who.agent,
        span=who.span,
        parent_span=who.parent_span,
        started=started,
        ended=time.time(),
        adapter=adapter,
        status_rule=rule,
    )
    recording.tool_result(report)


def report_problem(where: str, error: BaseException) -> None:
    """Log a failure of an adapter, once per attempt, as one of the attempt's problems; the agent goes on."""
    text = f"{where} failed: {describe_error(error)}"
    active = current_attempt()
    if active is None or active.recording.problem(text):
        logger.warning("%s. The agent goes on; what it did here may be missing from the record.", text)
        logger.debug("Where it failed:", exc_info=error)


def guarded(event: Callable[P, None]) -> Callable[P, None]:
    """Have an adapter's event handler report what it raises as a problem.

    >>> @guarded
    ... def on_end() -> None:
    ...     raise KeyError("no such run")
    >>> on_end()
    """

    @functools.wraps(event)
    def handle(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            event(*args, **kwargs)
        except Exception as error:
            report_problem(f"{event.__module__}.{event.__qualname__}", error)

    return handle


class BoundedDict(dict[K, V]):
    """The latest `most` entries: one more drops the oldest, for frameworks do not report the end of every run.

    >>> latest = BoundedDict(2)
    >>> for number in range(3):
    ...     latest[number] = "open"
    >>> list(latest)
    [1, 2]
    """

    def __init__(self, most: int = 20_000) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self._most:
            del self[next(iter(self))]


def spooled(folder: Path) -> Recording:
    """A recording that writes its reports as lines of JSON into `folder`, each process into a file of its own."""

    def write(report: Report) -> None:
        data = report.model_dump_json(exclude_none=True).encode() + b"\n"
        try:
            # Opened for each line: what one write appends is whole, whichever thread or fork makes it.
            file = os.open(folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, data)
            finally:
                os.close(file)
        except OSError as error:
            logger.warning("A report to agl could not be written and is missing from the record: %s.", error)

    return Recording(write)


def read_spool(folder: Path, recording: Recording) -> None:
    """Add the reports of all processes in `folder`; a report that cannot be read is a problem of the recording.

    Any process of the command may have written there. So the source of every report is the command, whatever the report
    claims, and only regular files count, up to `MAX_SPOOL` bytes in all.
    """
    room = MAX_SPOOL
    try:
        # Opened, for by now something else may be in its place.
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            with os.scandir(opened) as entries:
                spools = (entry.name for entry in entries if entry.name.endswith(".jsonl"))
                names = sorted(itertools.islice(spools, _MAX_SPOOLS))
            for name in names:
                room = _read_file(opened, name, room, recording)
        finally:
            os.close(opened)
    except OSError as error:
        recording.problem(f"The reports of the command's processes cannot be read: {error.strerror}")


def _read_file(folder: int, name: str, room: int, recording: Recording) -> int:
    """Add the reports in one file, up to `room` bytes; returns how many are left."""
    process = ascii(name.removesuffix(".jsonl"))[1:-1]
    try:
        # A FIFO would keep whoever opens it waiting, and a link leads anywhere.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with open(file, "rb") as spool:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            while text := spool.readline(max(room, 1)):
                room -= max(len(text), _MIN_LINE)
                if room <= 0:
                    limit = f"{MAX_SPOOL >> 20} MiB"
                    recording.problem(f"The command's processes reported more than {limit}; the rest is left out.")
                    break
                _read_line(text, process, recording)
    except OSError as error:
        recording.problem(f"The reports of process {process} cannot be read: {error.strerror}")
    return room


def _read_line(text: bytes, process: str, recording: Recording) -> None:
    try:
        report = Report.model_validate_json(text)
    except ValidationError as error:
        recording.problem(f"A report of process {process} cannot be read: {error.errors()[0]['msg']}")
        return
    if report.tool_result is not None:
        by_command = replace(report.tool_result, source=Source.COMMAND)
        report = report.model_copy(update={"tool_result": by_command})
    report.add_to(recording)
