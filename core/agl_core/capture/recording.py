"""Reports of one attempt's agent besides its calls: tool results, rewards, and problems of adapters."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from agl_core.types import Json, Source, ToolResult
from agl_core.wire import MAX_ADDRESS, MAX_BYPASSED, RewardReport

logger = logging.getLogger(__name__)

SPANS = "otel"
"""The `adapter` of tool results from OpenTelemetry's spans; a framework's own adapter counts before it."""
MAX_SPOOL = 64 << 20
"""Bytes of the reports of a command's processes."""
_MIN_LINE = 1024
"""Bytes that a line counts for at least: many short ones take long too."""
MAX_PROBLEMS, _MAX_PROBLEM = 100, 2000
"""Problems that are kept, and the characters of one: any process that a command starts may report them."""
_MAX_SPOOLS = 4096
"""Processes of a command whose reports are read."""


class Report(BaseModel):
    """A report of an agent's process: one field is set, named after the method of `Recording` that takes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool_result: ToolResult | None = None
    reward: RewardReport | None = None
    problem: str | None = None
    bypassed: str | None = None

    def add_to(self, recording: Recording) -> None:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if value is not None:
                getattr(recording, name)(value)


class Recording:
    """Collects the reports of one attempt, from any thread, until it is closed.

    In an agent's process, `send` also passes each report on at once, so that nothing is lost if that is killed.
    """

    def __init__(self, send: Callable[[Report], None] = lambda report: None) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._tool_results: dict[str, ToolResult] = {}
        self._rewards: list[RewardReport] = []
        self._problems: dict[str, None] = {}
        self._bypassed: Counter[str] = Counter()
        self._closed = False

    @property
    def tool_results(self) -> tuple[ToolResult, ...]:
        """In the order reported; an id reported twice counts once."""
        with self._lock:
            return tuple(self._tool_results.values())

    @property
    def rewards(self) -> tuple[RewardReport, ...]:
        with self._lock:
            return tuple(self._rewards)

    @property
    def problems(self) -> tuple[str, ...]:
        """Failures of adapters, each once."""
        with self._lock:
            return tuple(self._problems)

    @property
    def bypassed_calls(self) -> dict[str, int]:
        """Calls of model APIs that are not agl's, by address."""
        with self._lock:
            return dict(self._bypassed)

    def tool_result(self, report: ToolResult) -> None:
        with self._lock:
            if not self._closed:
                self._tool_results.setdefault(report.id, report)
        self._send(Report(tool_result=report))

    def reward(self, report: RewardReport) -> None:
        with self._lock:
            if not self._closed:
                self._rewards.append(report)
        self._send(Report(reward=report))

    def problem(self, text: str) -> bool:
        """Keep a failure of an adapter, also after the end; True if it is new and among the first."""
        text = text[:_MAX_PROBLEM]
        with self._lock:
            is_new = text not in self._problems and len(self._problems) < MAX_PROBLEMS
            if is_new:
                self._problems[text] = None
        if is_new:
            self._send(Report(problem=text))
        return is_new

    def bypassed(self, address: str) -> None:
        """Count a call of a model API that agl does not see."""
        address = address[:MAX_ADDRESS]
        with self._lock:
            has_room = address in self._bypassed or len(self._bypassed) < MAX_BYPASSED
            if has_room and not self._closed:
                self._bypassed[address] += 1
        self._send(Report(bypassed=address))

    def close(self) -> None:
        """Keep no more; closing it again changes nothing."""
        with self._lock:
            self._closed = True


@dataclass(slots=True, eq=False)
class SentCall:
    """A model call of an attempt without a server, as it was sent, and its reply as it came."""

    address: str
    body: bytes
    headers: dict[str, str]
    """The headers of the request, and who makes the call, as a server would have got them."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: float = field(default_factory=time.time)
    ended: float = 0.0
    reply: bytes | None = None
    """None before it has come, and if it has another status than 200."""
    reply_headers: Mapping[str, str] = field(default_factory=dict)
    result: Any = None
    """The reply as its HTTP library has it."""

    def end(self, reply: bytes) -> None:
        self.reply, self.ended = reply, time.time()


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


def describe_error(error: BaseException) -> str:
    """Type and message of an exception, as records keep it."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}"[:2000] if text else type(error).__name__


def jsonable(value: Any, limit: int = 16_384) -> Json:
    """`value` as JSON, a longer one than `limit` bytes as a text that is cut, with a note; it never raises.

    >>> jsonable({"at": (1, 2), "who": {"Ann"}})
    {'at': [1, 2], 'who': ['Ann']}
    >>> jsonable("x" * 20, limit=12)
    'xxxxxxxxxxxx… (8 more characters)'
    """
    if isinstance(value, str):
        return _cut(value, limit)
    try:
        encoded = orjson.dumps(value, _plain, orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except Exception:  # It contains itself, a number of more than 64 bits, …
        return _cut(_text_of(value), limit)
    return orjson.loads(encoded) if len(encoded) <= limit else _cut(encoded.decode(), limit)


def _plain(value: Any) -> Any:
    """A value that stands for one that is not JSON itself."""
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    return _text_of(value)


def _text_of(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be read: {type(error).__name__}>"


def _cut(text: str, limit: int) -> str:
    # A lone surrogate cannot be encoded, and would fail only when the record is sent.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)"
