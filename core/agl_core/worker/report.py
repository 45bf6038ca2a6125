"""How an attempt ended, and the report of it, in a size that the server takes: what is too much is cut, with a note."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import orjson

from agl_core.capture import Recording
from agl_core.capture.recording import jsonable
from agl_core.errors import last_frames
from agl_core.types import Ending, Json
from agl_core.wire.workers import (
    MAX_BODY,
    MAX_DEPTH,
    MAX_REPORTS,
    MAX_RESULT,
    CloseRequest,
    RewardReport,
    ToolResultReport,
)

logger = logging.getLogger(__name__)

Report = TypeVar("Report", ToolResultReport, RewardReport)

LEAST = 96
"""Bytes of JSON that any value can be cut to."""
_MAX_ERROR = 64 << 10
"""Bytes of an attempt's error as JSON."""
_NOTE = 48
"""Bytes that the note in a text that was cut takes at most."""
_SPARE = 1024
"""Bytes of a report that are left free."""
_MAX_NAME = 4096
"""Bytes of an id or a name as JSON, in a report of which something has to be cut."""
_NAMES = ("id", "tool", "tool_call_id", "agent", "span", "parent_span", "adapter", "status_rule")
_VALUES = ("arguments", "result", "error")
"""The fields of a tool result that are cut if there is too much of it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended, as the worker saw it."""

    ending: Ending
    result: Json = None
    error: str | None = None


def finished(result: Any) -> Ended:
    """The end of an agent that returned `result`: a crash if that is not JSON, or more than a report can carry."""
    try:
        encoded = orjson.dumps(result)
        returned = orjson.loads(encoded)
    except TypeError as error:
        problem = f"what is not JSON ({error}); return a string, number, list or dict"
    else:
        depth = depth_of(returned)
        if isinstance(result, float) and returned is None:
            problem = "a number that is not finite"
        elif len(encoded) > MAX_RESULT:
            problem = f"{len(encoded)} bytes of JSON, and {MAX_RESULT} are the limit; return less"
        elif depth > MAX_DEPTH:
            problem = f"JSON nested {depth} deep, and {MAX_DEPTH} is the limit; return less"
        else:
            return Ended(Ending.FINISHED, returned)
    return Ended(Ending.CRASHED, error=f"the agent returned {problem}")


def crashed(error: BaseException) -> Ended:
    """The end of an agent that raised: the error, where it was raised, and the end of its traceback."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(last[0].filename)}:{last[0].lineno})" if last else ""
    try:
        message = str(error)
    except Exception as failure:
        message = f"(its message cannot be read: {type(failure).__name__})"
    message = bounded_text(f"{type(error).__name__}: {message}", _MAX_ERROR // 2)
    return Ended(Ending.CRASHED, error=f"{message}{where}\n{last_frames(error)}".rstrip())


def closing(ended: Ended, recording: Recording) -> CloseRequest:
    """The report of an attempt's end; a number as its result is a reward too.

    A result that is too large or too deep makes it a crash. Beside the result, arguments and results of tools are cut,
    the largest first, until all have room, each with a note in it. If there is still no room, the last tool results
    and rewards are left out.
    """
    ended = _bounded(ended)
    rewards = list(recording.rewards)
    if isinstance(ended.result, int | float) and not isinstance(ended.result, bool):
        rewards.append(RewardReport(name="result", value=ended.result))
    request = CloseRequest(
        ending=ended.ending,
        result=ended.result,
        error=ended.error,
        tool_results=_first(recording.tool_results, MAX_REPORTS, "tool_results", recording),
        rewards=_first(rewards, MAX_REPORTS, "rewards", recording),
        bypassed=recording.bypassed_calls,
    )
    return request if _can_be_taken(request) else _cut(request, recording)


def _bounded(ended: Ended) -> Ended:
    """The same end, with a result and an error that can be reported."""
    if ended.result is not None and (checked := finished(ended.result)).ending is not Ending.FINISHED:
        return checked
    return Ended(ended.ending, ended.result, None if ended.error is None else bounded_text(ended.error, _MAX_ERROR))


def _can_be_taken(request: CloseRequest) -> bool:
    """Whether the server takes it, by the server's own check."""
    try:
        body = request.model_dump_json().encode()
        CloseRequest.model_validate_json(body)
    except ValueError:  # It is too deep, or has lone surrogates.
        return False
    return len(body) <= MAX_BODY


def _cut(request: CloseRequest, recording: Recording) -> CloseRequest:
    """The report with less of what tools were given and gave: each of them has the same room."""
    _warn(
        recording,
        f"What an attempt reported of its tools and rewards was more than a report can carry ({MAX_BODY >> 20} MiB): "
        f"the largest values were cut.",
    )
    bare = request.model_copy(update={"tool_results": [], "rewards": []})
    room = MAX_BODY - _SPARE - _size(bare)
    named = [reward.model_copy(update={"name": bounded_text(reward.name, _MAX_NAME)}) for reward in request.rewards]
    rewards = _first(named, _count_with_room(named, room // 2), "rewards", recording)
    room -= sum(map(_size, rewards))
    limit = max(room // (len(_VALUES) * max(len(request.tool_results), 1)) - _SPARE, LEAST)
    shortened = [_shortened(tool_result, limit) for tool_result in request.tool_results]
    tool_results = _first(shortened, _count_with_room(shortened, room), "tool_results", recording)
    report = bare.model_copy(update={"tool_results": tool_results, "rewards": rewards})
    if _can_be_taken(report):
        return report
    return CloseRequest(ending=Ending.CRASHED, error="what the attempt reported cannot be sent")


def _shortened(tool_result: ToolResultReport, limit: int) -> ToolResultReport:
    """The same with no name above `_MAX_NAME` and no value above `limit` bytes."""
    names = {name: getattr(tool_result, name) for name in _NAMES}
    names = {name: bounded_text(text, _MAX_NAME) for name, text in names.items() if text is not None}
    values = {name: bounded_json(getattr(tool_result, name), limit) for name in _VALUES}
    return tool_result.model_copy(update={**names, **values})


def _count_with_room(reports: Sequence[Report], room: int) -> int:
    """How many of these have room, counted from the first."""
    return sum(total <= room for total in accumulate(map(_size, reports)))


def _size(report: CloseRequest | ToolResultReport | RewardReport) -> int:
    """Its bytes as JSON in a list."""
    return len(report.model_dump_json().encode()) + 1


def _first(reports: Sequence[Report], count: int, kind: str, recording: Recording) -> list[Report]:
    if count < len(reports):
        _warn(recording, f"An attempt reported more {kind} than a report can carry; only the first ones are kept.")
        logger.warning("Of its %d %s %d are kept.", len(reports), kind, count)
    return list(reports[:count])


def _warn(recording: Recording, problem: str) -> None:
    recording.problem(problem)
    logger.warning("%s", problem)


def bounded_text(text: str, most: int, *, from_end: bool = False) -> str:
    """A text cut to `most` bytes of JSON, from its start or its end, with a note of what is left out.

    JSON writes a control character as six bytes. Lone surrogates, which cannot be sent, become question marks.

    >>> bounded_text("a" * 1000, 60)
    'aaaaaaaaaa… (990 more characters)'
    """
    text = text.encode("utf-8", "replace").decode()
    if len(orjson.dumps(text)) <= most:
        return text
    part, room = text, most - _NOTE
    while (size := len(orjson.dumps(part))) > room:
        kept = len(part) * room // size
        part = part[len(part) - kept :] if from_end else part[:kept]
    left_out = len(text) - len(part)
    return f"({left_out} characters before) …{part}" if from_end else f"{part}… ({left_out} more characters)"


def bounded_json(value: Json, most: int) -> Json:
    """A value cut to `most` bytes of JSON, with notes of what is left out; `most` is `LEAST` or more."""
    if isinstance(value, str):
        return bounded_text(value, most)
    less, limit = value, most
    while (size := json_size(less)) is None or size > most:
        less = jsonable(value, limit)
        limit = limit // 2 if size is None else limit * most // size * 15 // 16
    return less


def json_size(value: Json) -> int | None:
    """Bytes of a value as JSON; None if it cannot be sent: it is too deep, or has lone surrogates in it."""
    try:
        encoded = orjson.dumps(value)
    except TypeError:
        return None
    may_be_deep = encoded.count(b"[") + encoded.count(b"{") > MAX_DEPTH
    return None if may_be_deep and depth_of(value) > MAX_DEPTH else len(encoded)


def depth_of(value: Json) -> int:
    """How deep arrays and objects are nested.

    >>> depth_of([1, {"a": []}]), depth_of("[[")
    (3, 0)
    """
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list | tuple)]:
        depth += 1
        level = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
    return depth
