"""How an attempt ended, and the report of it, in a size that the server takes: what is too much is cut, with a note."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from typing import Any

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

LARGEST, LEAST = 1 << 20, 64
"""Characters that the values of tool results are cut to if there is too much of them: at first, and at least."""
_MAX_ERROR = 64 << 10
"""Characters of an attempt's error."""
_MAX_NAME = 1024
"""Characters of an id or a name, in a report of which something has to be cut."""
_NAMES = ("id", "tool", "tool_call_id", "agent", "span", "parent_span", "adapter", "status_rule")
_VALUES = ("arguments", "result", "error")


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
    message = jsonable(f"{type(error).__name__}: {message}", _MAX_ERROR // 2)
    return Ended(Ending.CRASHED, error=f"{message}{where}\n{last_frames(error)}".rstrip())


def closing(ended: Ended, recording: Recording) -> CloseRequest:
    """The report of an attempt's end; a number as its result is a reward too.

    A result that is too large or too deep makes it a crash. Beside the result, the largest arguments and results of
    tools are cut until the server takes the report; if that is not enough, the last tool results and rewards are left
    out.
    """
    ended = _bounded(ended)
    tool_results, rewards = list(recording.tool_results), list(recording.rewards)
    if isinstance(ended.result, int | float) and not isinstance(ended.result, bool):
        rewards.append(RewardReport(name="result", value=ended.result))
    request = CloseRequest(
        ending=ended.ending,
        result=ended.result,
        error=ended.error,
        tool_results=tool_results[:MAX_REPORTS],
        rewards=rewards[:MAX_REPORTS],
        bypassed=recording.bypassed_calls,
    )
    limit = LARGEST
    while (request.tool_results or request.rewards) and not _can_be_taken(request):
        recording.problem(
            f"What an attempt reported of its tools and rewards was more than a report can carry "
            f"({MAX_BODY >> 20} MiB): the largest values were cut."
        )
        request = _smaller(request, limit)
        limit //= 4
    if len(request.tool_results) < len(tool_results) or len(request.rewards) < len(rewards):
        recording.problem(
            "An attempt reported more tool results or rewards than a report can carry; only the first ones are kept."
        )
    return request


def _bounded(ended: Ended) -> Ended:
    """The same end, with a result and an error that can be reported."""
    if ended.result is not None and (checked := finished(ended.result)).ending is not Ending.FINISHED:
        return checked
    return Ended(ended.ending, ended.result, None if ended.error is None else str(jsonable(ended.error, _MAX_ERROR)))


def _can_be_taken(request: CloseRequest) -> bool:
    """Whether the server takes it, by the server's own check."""
    try:
        body = request.model_dump_json().encode()
        CloseRequest.model_validate_json(body)
    except ValueError:  # It is too deep, or has lone surrogates.
        return False
    return len(body) <= MAX_BODY


def _smaller(request: CloseRequest, limit: int) -> CloseRequest:
    """The report with no value above `limit`; where values would say nothing any more, with half of its reports."""
    tool_results, rewards = request.tool_results, request.rewards
    if limit < LEAST:
        tool_results, rewards = tool_results[: len(tool_results) // 2], rewards[: len(rewards) // 2]
    else:
        tool_results = [_shortened(tool_result, limit) for tool_result in tool_results]
        rewards = [each.model_copy(update={"name": jsonable(each.name, _MAX_NAME)}) for each in rewards]
    return request.model_copy(update={"tool_results": tool_results, "rewards": rewards})


def _shortened(tool_result: ToolResultReport, limit: int) -> ToolResultReport:
    """The same with no name above `_MAX_NAME` and no value above `limit` characters."""
    names = {name: getattr(tool_result, name) for name in _NAMES}
    names = {name: jsonable(text, _MAX_NAME) for name, text in names.items() if text is not None}
    values = {name: jsonable(getattr(tool_result, name), limit) for name in _VALUES}
    deep = {name: value for name, value in values.items() if depth_of(value) > MAX_DEPTH}
    as_text = {name: jsonable(orjson.dumps(value).decode(), limit) for name, value in deep.items()}
    return tool_result.model_copy(update={**names, **values, **as_text})


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
