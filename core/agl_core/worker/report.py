"""The report of an attempt's end, in a size that the server takes: what is too much is cut, with a note."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import TypeVar

from agl_core.capture import Recording
from agl_core.client.http import RefusedError
from agl_core.types import Ending, Json
from agl_core.wire.body import MAX_BODY
from agl_core.wire.workers import MAX_REPORTS, CloseRequest, RewardReport, ToolResultReport
from agl_core.worker.bounds import LEAST, MAX_ERROR, bounded_json, bounded_text, json_size
from agl_core.worker.environment import Ended, finished

logger = logging.getLogger(__name__)

Report = TypeVar("Report", ToolResultReport, RewardReport)

_TOO_MUCH = frozenset({413, 422})
"""What the server answers to a report that it cannot take."""
_SPARE = 1024
"""Bytes of a report that are left free."""
_MAX_NAME = 4096
"""Bytes of an id or a name as JSON, in a report of which something has to be cut."""
_NAMES = ("id", "tool", "tool_call_id", "agent", "span", "parent_span", "adapter", "status_rule")
_VALUES = ("arguments", "result", "error")
"""The fields of a tool result that are cut if there is too much of it."""


def closing(ended: Ended, recording: Recording) -> CloseRequest:
    """The report of an attempt's end; a number as its result is a reward too.

    A result that is too large or too deep makes it a crash. Beside the result, the largest arguments and results of
    tools are cut until all have room, each with a note in it. If there is still no room, the last tool results and
    rewards are left out.
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
        undelivered=list(recording.undelivered_calls[:MAX_REPORTS]),
        bypassed=recording.bypassed_calls,
    )
    return request if _can_be_taken(request) else _cut(request, recording)


def is_too_much(error: RefusedError) -> bool:
    """Whether the server refused a report for its content."""
    return error.status in _TOO_MUCH


def instead_of_refused(error: RefusedError) -> CloseRequest:
    """The report to send instead of one that the server refused for its content."""
    reason = bounded_text(str(error), MAX_ERROR // 2)
    return CloseRequest(ending=Ending.CRASHED, error=f"the report of how the attempt ended was refused: {reason}")


def _bounded(ended: Ended) -> Ended:
    """The same end, with a result and an error that can be reported."""
    if ended.result is not None and (checked := finished(ended.result)).ending is not Ending.FINISHED:
        return checked
    return Ended(ended.ending, ended.result, None if ended.error is None else bounded_text(ended.error, MAX_ERROR))


def _can_be_taken(request: CloseRequest) -> bool:
    """Whether the server takes it, by the server's own check."""
    try:
        body = request.model_dump_json().encode()
        CloseRequest.model_validate_json(body)
    except ValueError:  # It is too deep, or has lone surrogates.
        return False
    return len(body) <= MAX_BODY


def _cut(request: CloseRequest, recording: Recording) -> CloseRequest:
    """The report with less of what tools were given and gave."""
    _warn(
        recording,
        f"What an attempt reported of its tools and rewards was more than a report can carry ({MAX_BODY >> 20} MiB): "
        f"the largest values were cut.",
    )
    bare = request.model_copy(update={"tool_results": [], "rewards": []})
    room = MAX_BODY - _SPARE - _size(bare)
    named = [each.model_copy(update={"name": bounded_text(each.name, _MAX_NAME)}) for each in request.rewards]
    rewards = _first(named, _fitting(map(_size, named), room // 2), "rewards", recording)
    room -= sum(map(_size, rewards))
    tool_results = _smaller(request.tool_results, room, recording)
    return bare.model_copy(update={"tool_results": tool_results, "rewards": rewards})


def _smaller(tool_results: Sequence[ToolResultReport], room: int, recording: Recording) -> list[ToolResultReport]:
    """These in `room` bytes: small values as they are, large ones cut to one size."""
    names = [_names_only(each) for each in tool_results]
    values: list[list[Json]] = [
        [bounded_json(getattr(each, field), MAX_BODY) for field in _VALUES] for each in tool_results
    ]
    sizes = [[json_size(value) or 0 for value in row] for row in values]
    least = [_size(each) + sum(min(size, LEAST) for size in row) for each, row in zip(names, sizes, strict=True)]
    kept = _first(names, _fitting(least, room), "tool_results", recording)
    most = _share(chain(*sizes[: len(kept)]), room - sum(map(_size, kept)))
    return [
        each.model_copy(update={name: bounded_json(value, most) for name, value in zip(_VALUES, row, strict=True)})
        for each, row in zip(kept, values, strict=False)
    ]


def _names_only(tool_result: ToolResultReport) -> ToolResultReport:
    names = {name: getattr(tool_result, name) for name in _NAMES}
    cut = {name: bounded_text(value, _MAX_NAME) for name, value in names.items() if value is not None}
    return tool_result.model_copy(update={**cut, **dict.fromkeys(_VALUES)})


def _share(sizes: Iterable[int], room: int) -> int:
    """The size to which larger values have to be cut, so that all have room together.

    >>> _share([10, 500, 900], 710)
    350
    """
    ordered = sorted(sizes)
    for place, size in enumerate(ordered):
        share = room // (len(ordered) - place)
        if size > share:
            return share
        room -= size
    return max(ordered, default=0)


def _fitting(sizes: Iterable[int], room: int) -> int:
    """How many of these have room, counted from the first."""
    return sum(total <= room for total in accumulate(sizes))


def _size(report: CloseRequest | ToolResultReport | RewardReport) -> int:
    """Its bytes as JSON in a list."""
    return len(report.model_dump_json().encode()) + 1


def _first(found: Sequence[Report], count: int, what: str, recording: Recording) -> list[Report]:
    if count < len(found):
        _warn(recording, f"An attempt reported more {what} than a report can carry; only the first ones are kept.")
        logger.warning("Of its %d %s %d are kept.", len(found), what, count)
    return list(found[:count])


def _warn(recording: Recording, problem: str) -> None:
    recording.problem(problem)
    logger.warning("%s", problem)
