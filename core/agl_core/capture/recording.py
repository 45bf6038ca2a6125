"""What one attempt's agent reports besides its calls: tool results, rewards, and what adapters could not do."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import logging
import math
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from agl_core.types import Json, Source
from agl_core.wire.workers import MAX_ADDRESS, MAX_BYPASSED, RewardReport, ToolResultReport

logger = logging.getLogger(__name__)

MAX_SPOOL = 64 << 20
"""Bytes of the reports of a command's processes."""
_MIN_LINE = 1024
"""What a line counts for at least: many short ones take long too."""
_MAX_SPOOLS = 4096
"""Processes of a command whose reports are read."""
_MAX_DEPTH = 16
"""Levels of arrays and objects in the record of a tool's arguments or result."""
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A tool call that a response asked for."""

    tool_call_id: str
    tool: str
    arguments: Json = None
    agent: str | None = None
    """Whose response it was."""
    parent_span: str | None = None
    """The span that encloses the call."""
    spans: frozenset[str] = frozenset()
    """All spans around the call. They distinguish requests with one id: some endpoints number them from 0 each time."""


class Report(BaseModel):
    """One report on its way from an agent's process to the one that started it.

    One of the fields is set; each is named after the method of `Recording` that takes it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool_result: ToolResultReport | None = None
    reward: RewardReport | None = None
    problem: str | None = None
    undelivered: str | None = None
    bypassed: str | None = None

    def add_to(self, recording: Recording) -> None:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if value is not None:
                getattr(recording, name)(value)


class Recording:
    """Collects the reports of one attempt, from any thread, until it is closed.

    A report that comes after `close` is not kept. In an agent's process, each report is also sent on at once by `send`,
    so that nothing is lost if the process is killed.
    """

    def __init__(self, send: Callable[[Report], None] = lambda report: None) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._tool_results: dict[str, ToolResultReport] = {}
        self._rewards: list[RewardReport] = []
        self._problems: dict[str, None] = {}
        self._undelivered: dict[str, None] = {}
        self._bypassed: Counter[str] = Counter()
        self._requests: dict[str, list[ToolRequest]] = {}
        self._answered: set[tuple[str, str | None]] = set()
        """By tool call id and the parent span of the call."""
        self._closed = False

    @property
    def tool_results(self) -> tuple[ToolResultReport, ...]:
        """What the tools did, in the order reported; an id reported twice counts once."""
        with self._lock:
            return tuple(self._tool_results.values())

    @property
    def rewards(self) -> tuple[RewardReport, ...]:
        """The rewards that the agent reported, in order."""
        with self._lock:
            return tuple(self._rewards)

    @property
    def problems(self) -> tuple[str, ...]:
        """What adapters could not do, each once; the agent went on without them."""
        with self._lock:
            return tuple(self._problems)

    @property
    def undelivered_calls(self) -> tuple[str, ...]:
        """The ids of calls whose replies the agent did not read to their end."""
        with self._lock:
            return tuple(self._undelivered)

    @property
    def bypassed_calls(self) -> dict[str, int]:
        """How often model APIs were called that are not agl's, by address."""
        with self._lock:
            return dict(self._bypassed)

    def tool_result(self, report: ToolResultReport, spans: Collection[str] | None = None) -> None:
        """Keep what a tool did; the first report of an id counts.

        With `spans`, those around the run, it is the agent's whose response asked for it (see `asked`), and belongs to
        that call: another agent may have run the tool.
        """
        request = self.request(report.tool_call_id or "", [report.parent_span or ""] if spans is None else spans)
        if request and spans is not None:
            report = report.model_copy(update={"agent": request.agent, "parent_span": request.parent_span})
        with self._lock:
            if not self._closed:
                self._tool_results.setdefault(report.id, report)
                if request:
                    self._answered.add((request.tool_call_id, request.parent_span))
        self._send(Report(tool_result=report))

    def reward(self, report: RewardReport) -> None:
        with self._lock:
            if not self._closed:
                self._rewards.append(report)
        self._send(Report(reward=report))

    def problem(self, text: str) -> bool:
        """Keep what an adapter could not do, even after the end; True if it is new."""
        with self._lock:
            is_new = text not in self._problems
            self._problems[text] = None
        if is_new:
            self._send(Report(problem=text))
        return is_new

    def undelivered(self, call: str) -> None:
        """The agent closed the stream of this call's reply before its end."""
        with self._lock:
            if not self._closed:
                self._undelivered[call] = None
        self._send(Report(undelivered=call))

    def bypassed(self, address: str) -> None:
        """The agent calls a model API elsewhere: agl does not see that call."""
        address = address[:MAX_ADDRESS]
        with self._lock:
            has_room = address in self._bypassed or len(self._bypassed) < MAX_BYPASSED
            if has_room and not self._closed:
                self._bypassed[address] += 1
        self._send(Report(bypassed=address))

    def asked(self, request: ToolRequest) -> None:
        """Remember that a response asked for a tool: a later tool result with this id answers it."""
        with self._lock:
            if not self._closed:
                self._requests.setdefault(request.tool_call_id, []).append(request)
                self._answered.discard((request.tool_call_id, request.parent_span))

    def request(self, tool_call_id: str, spans: Collection[str] = ()) -> ToolRequest | None:
        """The request with this id, if a response of this attempt made it.

        If several have the id, the one that shares most of `spans` counts; among equals, the latest.
        """
        with self._lock:
            made = self._requests.get(tool_call_id, ())
            return max(reversed(made), key=lambda each: len(each.spans.intersection(spans)), default=None)

    def unanswered(self, tool_call_id: str, spans: Collection[str] = ()) -> ToolRequest | None:
        """The request that `request` gives, if no tool result was reported for it yet."""
        found = self.request(tool_call_id, spans)
        with self._lock:
            return None if found is None or (tool_call_id, found.parent_span) in self._answered else found

    def close(self) -> None:
        """The attempt has ended; closing it again changes nothing."""
        with self._lock:
            self._closed = True


def spooled(folder: Path) -> Recording:
    """A recording that writes its reports into `folder`, one JSON object a line; each process has a file of its own."""

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
    """Add the reports of all processes in `folder`; what cannot be read is a problem of the recording.

    Any process that the command started could write there, whatever it likes. So the source of all reports is the
    command, whatever they claim, and only regular files count, up to `MAX_SPOOL` bytes in all.
    """
    room = MAX_SPOOL
    try:
        # Opened, for by now something else may be in its place.
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            for name in _spools(opened):
                room = _read_file(opened, name, room, recording)
        finally:
            os.close(opened)
    except OSError as error:
        recording.problem(f"The reports of the command's processes cannot be read: {error.strerror}")


def _spools(folder: int) -> list[str]:
    """The names of the files, oldest first."""
    with os.scandir(folder) as entries:
        named = itertools.islice((each for each in entries if each.name.endswith(".jsonl")), _MAX_SPOOLS)
        dated = [(each.stat(follow_symlinks=False).st_mtime_ns, each.name) for each in named]
    return [name for _, name in sorted(dated)]


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
        by_command = report.tool_result.model_copy(update={"source": Source.COMMAND})
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
    """`value` as JSON, about `limit` characters at most; what does not fit is replaced by a note that says so.

    It never raises: a value that is not JSON is kept as its text.

    >>> jsonable({"at": (1, 2), "rate": float("inf")})
    {'at': [1, 2], 'rate': 'inf'}
    >>> jsonable("x" * 20, limit=12)
    'xxxxxxxxxxxx… (8 more characters)'
    """
    try:
        return _Converter(limit).convert(value, 0)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be read: {type(error).__name__}>"


class _Converter:
    def __init__(self, limit: int) -> None:
        self._left = limit

    def convert(self, value: Any, depth: int) -> Json:
        if value is None or isinstance(value, bool):
            self._left -= 5
            return value
        if isinstance(value, int) and -_INT64 <= value < _INT64:
            self._left -= 20
            return int(value)
        if isinstance(value, float) and math.isfinite(value):
            self._left -= 20
            return float(value)
        if isinstance(value, str):
            return self._text(value)
        if depth < _MAX_DEPTH:
            if isinstance(value, BaseModel):
                return self._mapping({name: getattr(value, name) for name in type(value).model_fields}, depth)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
                return self._mapping(fields, depth)
            if isinstance(value, Mapping):
                return self._mapping(value, depth)
            if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray | memoryview):
                return self._sequence(value, depth)
        return self._text(_text_of(value))

    def _text(self, text: str) -> str:
        # A lone surrogate cannot be encoded, and would fail only when the record is sent.
        text = text.encode("utf-8", "replace").decode()
        room = max(self._left, 0)
        self._left -= len(text) + 2
        return text if len(text) <= room else f"{text[:room]}… ({len(text) - room} more characters)"

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> Json:
        converted: dict[str, Json] = {}
        for place, (key, item) in enumerate(value.items()):
            if self._left <= 0:
                converted["…"] = f"{len(value) - place} more entries"
                break
            name = self._text(key if isinstance(key, str) else _text_of(key))
            converted[name] = self.convert(item, depth + 1)
        return converted

    def _sequence(self, value: Sequence[Any] | Set[Any], depth: int) -> Json:
        converted: list[Json] = []
        for place, item in enumerate(value):
            if self._left <= 0:
                converted.append(f"… ({len(value) - place} more items)")
                break
            converted.append(self.convert(item, depth + 1))
        return converted


def _text_of(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be read: {type(error).__name__}>"
