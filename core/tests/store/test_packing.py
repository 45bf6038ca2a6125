"""Records cross the wire exactly, and nothing else does."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.errors import StoreError, StoreRefusedError
from agl_core.store import codec
from agl_core.store.packing import pack, unpack
from agl_core.store.pieces import Pieces
from agl_core.types import Attempt, Call, Choice, FinishReason, Reward, TrainingRecord
from agl_core.wire.trainers import Binary, PackedRecords

from .any_records import attempts, calls, feedback, rewards, rollouts, runs, tool_results, training_records

anything = st.one_of(runs, rollouts, attempts, calls, tool_results, rewards, training_records, feedback)


def sent(records: list[Any]) -> list[Any]:
    """Packed, as the JSON that crosses the wire, and unpacked."""
    return unpack(PackedRecords.model_validate_json(pack(records).model_dump_json()))


@given(st.lists(anything, max_size=5, unique_by=lambda record: (type(record), getattr(record, "id", str(record)))))
def test_what_is_unpacked_is_what_was_packed(exactly: Any, records: list[Any]) -> None:
    """To the bit, as kinds in their order; and the store would write the very same rows of it."""
    kinds = {type(record).__name__ for record in records}
    back = sent(records)
    for kind in kinds:
        assert exactly([r for r in back if type(r).__name__ == kind]) == exactly(
            [r for r in records if type(r).__name__ == kind]
        )
    assert len(back) == len(records)
    written, again = (
        {table.name: rows for table, rows in codec.encode(each, Pieces(1)).items() if table.name != "attempt_keys"}
        for each in (sorted(records, key=repr), sorted(back, key=repr))
    )
    assert repr(written) == repr(again)


def test_numbers_that_json_lacks() -> None:
    values = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1]
    logprobs = np.array(values, np.float32)
    choice = Choice(0, {}, FinishReason.STOP, np.arange(6, dtype=np.int32), logprobs)
    call = Call("c", "r", 0, 0, "p", None, {}, (choice,), 0.0, 0.0)
    found = sent(
        [call, *(TrainingRecord("r", 0, str(number), 0, 0, value, value, value) for number, value in enumerate(values))]
    )
    *back, received = found
    assert received.choices[0].logprobs.tobytes() == logprobs.tobytes()
    assert (
        [repr(record.credit) for record in back]
        == [repr(record.weight) for record in back]
        == [repr(value) for value in values]
    )


def test_what_repeats_crosses_once(make_call: Any) -> None:
    system = {"role": "system", "content": "x" * 10_000}
    prompt = np.arange(4096, dtype=np.int32)
    many = [make_call(str(n), request={"messages": [system]}, prompt_ids=prompt, sequence=n) for n in range(20)]
    one, all_ = (len(pack(some).model_dump_json()) for some in (many[:1], many))
    assert one > 10_000 + len(base64.b64encode(prompt.tobytes()))
    assert all_ < 1.5 * one


def test_a_call_that_is_packed_twice_is_the_later_one(make_call: Any, exactly: Any) -> None:
    first = make_call("c", choices=tuple(Choice(index, {}, FinishReason.STOP) for index in range(3)))
    later = make_call("c", choices=(Choice(0, {"content": "new"}, FinishReason.STOP),))
    assert exactly(sent([first, later])[-1]) == exactly(later)


GOOD = ["r", 0, "name", 1.0, "rule", None, 0]
TASK = '{"id":"t","input":1,"split":"s","metadata":{}}'
ROLLOUT = ["r", "run", 0, "g", TASK, "train", 0, 0, "queued", None, None, 0]
CALL = ["r", 0, "c", 0, "p", None, '{"m":null}', '{"m":1}', Binary(base64="AQAAAAAAAAA="), 0, 0.0, 0.0, "api", None]
REST = [None, None, None, "{}", "{}", 0, 0, 0, 0, None, None, 0, 0, 1, None]


def replaced(row: list[Any], place: int, value: Any) -> list[Any]:
    return [*row[:place], value, *row[place + 1 :]]


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("pieces", [1, "{}"]),
        ("attempt_keys", ["r", 0]),
        ("nothing", []),
        ("rewards", GOOD[:-1]),
        ("rewards", replaced(GOOD, 0, 5)),
        ("rewards", replaced(GOOD, 0, None)),
        ("rewards", replaced(GOOD, 1, "0")),
        ("rewards", replaced(GOOD, 1, 2**63)),
        ("rewards", replaced(GOOD, 3, "much")),
        ("rewards", replaced(GOOD, 4, Binary(base64=""))),
        ("rollouts", replaced(ROLLOUT, 4, "{")),
        ("rollouts", replaced(ROLLOUT, 4, '{"id":"t"}')),
        ("rollouts", replaced(ROLLOUT, 5, "idle")),
        ("rollouts", replaced(ROLLOUT, 8, "gone")),
        ("calls", [*CALL, *REST]),
        ("calls", [*replaced(CALL, 8, Binary(base64="AQ==")), *REST]),
        ("calls", [*replaced(CALL, 8, Binary(base64="!")), *REST]),
        ("calls", [*replaced(CALL, 7, "[]"), *REST]),
        ("choices", ["r", 0, "c", 0, 0, "{}", "stop", "AAAA", None, None, None]),
    ],
)
def test_what_is_no_record_is_refused(table: str, row: list[Any]) -> None:
    with pytest.raises(StoreRefusedError):
        unpack(PackedRecords(tables={table: [row]}))


def test_the_rows_above_are_wrong_in_one_place_only() -> None:
    rows = {"rewards": [GOOD], "rollouts": [ROLLOUT], "calls": [[*CALL, *REST]]}
    assert len(unpack(PackedRecords(tables=rows, pieces=[(1, "{}")]))) == 3


def test_a_record_that_no_store_can_keep_is_named() -> None:
    with pytest.raises(StoreError, match=r"Attempt \(rollout 'r', attempt 0\) cannot be stored: result: it is not"):
        pack([Attempt("r", 0, "w", 0.0, result=object())])
    with pytest.raises(StoreError, match="UTF-8"):
        pack([Reward("r", 0, "\ud800", 1.0, "rule")]).model_dump_json()
