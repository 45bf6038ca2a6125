"""The tables of an export: their columns (docs/data.md describes them), a rollout's rows, and writing them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import orjson

from agl_core.reading.explained import AttemptReport
from agl_core.reading.metrics import MetricsLine
from agl_core.types import Episode, Reward, Rollout, TrainingRecord, Transition
from agl_core.types.forms import to_json

if TYPE_CHECKING:
    import pyarrow as pa

Row: TypeAlias = Mapping[str, Any]

_BATCH_BYTES = 8 << 20
"""Rows are kept until they take so much memory, and are then written together."""


class Column(Enum):
    """The type of a column's values. Each value may be missing."""

    TEXT = auto()
    INTEGER = auto()
    NUMBER = auto()
    TRUTH = auto()
    JSON = auto()
    """Any JSON value: in Parquet, its text."""
    INTEGERS = auto()
    NUMBERS = auto()
    TRUTHS = auto()


def _columns(**names: str) -> dict[str, Column]:
    """Columns by their type, each a list of names in words."""
    return {name: Column[kind] for kind, listed in names.items() for name in listed.split()}


_NAMED = _columns(TEXT="run rollout", INTEGER="restart attempt")
_TASK = _columns(TEXT="group mode split task ending", INTEGER="member step")
_USE = _columns(NUMBER="credit advantage weight", TEXT="dropped")

TABLES: Mapping[str, Mapping[str, Column]] = {
    "transitions": {
        **_NAMED,
        **_TASK,
        **_columns(TEXT="call agent policy finish_reason parse_error", INTEGER="choice turn agent_turn version"),
        **_columns(JSON="messages tools response tool_results state", INTEGERS="prompt_ids response_ids"),
        **_columns(NUMBERS="logprobs", TRUTHS="mask", TRUTH="prefix_broken pruned"),
        **_columns(NUMBER="temperature reward terminal_reward"),
        **_USE,
    },
    "episodes": {
        **_NAMED,
        **_TASK,
        **_columns(JSON="input metadata result", TEXT="error worker", INTEGER="transitions tool_results"),
        **_columns(NUMBER="terminal_reward started ended"),
    },
    "rewards": {**_NAMED, **_columns(TEXT="name source call", INTEGER="step choice", NUMBER="value")},
    "credits": {**_NAMED, **_columns(TEXT="call", INTEGER="choice step"), **_USE},
    "metrics": _columns(INTEGER="step restart", TEXT="kind key", NUMBER="value"),
}


def rows_of(rollout: Rollout, reward: float | None, report: AttemptReport, agent: str | None) -> dict[str, list[Row]]:
    """The rows of one rollout with its terminal reward, by table; `metrics` has none. None: of every agent."""
    episode, attempt = report.episode, report.attempt
    named = {**_fields(rollout, "run", "restart"), "rollout": rollout.id, "attempt": attempt.attempt}
    task = {
        **_fields(rollout, "group", "member", "step"),
        "mode": rollout.mode.value,
        "split": rollout.task.split,
        "task": rollout.task.id,
        "ending": episode.ending.value,
        "terminal_reward": reward,
    }
    selected = [transition for transition in episode.transitions if agent in (None, transition.agent)]
    keys = {(transition.key.call, transition.key.choice) for transition in selected}

    def of_selected(record: Reward | TrainingRecord) -> bool:
        return agent is None or record.call is None or (record.call, record.choice) in keys

    return {
        "transitions": [{**named, **task, **_transition(t, report)} for t in selected],
        "episodes": [
            {
                **named,
                **task,
                **_fields(rollout.task, "input", "metadata"),
                **_fields(attempt, "result", "error", "worker", "started", "ended"),
                "transitions": len(episode.transitions),
                "tool_results": sum(len(t.tool_results) for t in episode.transitions) + len(episode.unjoined),
            }
        ],
        "rewards": [
            {**named, "step": rollout.step, **_fields(record, "name", "value", "source", "call", "choice")}
            for record in filter(of_selected, episode.rewards)
        ],
        "credits": [
            {**named, **_fields(record, "call", "choice", "step", *_USE)}
            for record in filter(of_selected, report.training_records)
        ],
    }


def _transition(transition: Transition, report: AttemptReport) -> Row:
    records = [record for record in report.training_records if record.key == transition.key]
    last = max(records, key=lambda record: record.step, default=None)
    return {
        **_fields(transition.key, "call", "choice"),
        **_fields(transition, "agent", "turn", "agent_turn", "policy", "version", "temperature", "prompt_ids"),
        **_fields(transition, "response", "response_ids", "logprobs", "mask", "parse_error", "prefix_broken", "state"),
        "messages": list(transition.messages),
        "tools": list(transition.tools) or None,
        "finish_reason": transition.finish_reason.value,
        "tool_results": [to_json(tool_result) for tool_result in transition.tool_results],
        "reward": sum(reward.value for reward in report.rewards_of(transition)),
        **({} if last is None else _fields(last, *_USE)),
        "pruned": report.pruned,
    }


def metrics_rows(lines: Sequence[MetricsLine], steps: tuple[int, int] | None) -> Iterator[Row]:
    """The rows of `metrics`: one for each number of each line."""
    for line in lines:
        if steps is None or steps[0] <= line.step <= steps[1]:
            restart = int(line.values.get("restart", 0))
            for key, value in line.values.items():
                if key not in ("step", "restart"):
                    yield {"step": line.step, "kind": line.kind, "restart": restart, "key": key, "value": value}


def episode_of(report: AttemptReport, terminal: float | None) -> Episode:
    """The rollout as an episode with its rewards, as `agl_core.load_episodes` gives it back."""
    episode = report.episode
    return replace(
        episode,
        rewards=tuple(reward for reward in episode.rewards if reward.call is None),
        terminal=terminal,
        transitions=tuple(replace(t, rewards=tuple(report.rewards_of(t))) for t in episode.transitions),
    )


def _fields(record: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


class TableFile(Protocol):
    """One table that is being written."""

    def write(self, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


class JsonlFile:
    """One JSON object a line; lists and objects are what they are."""

    def __init__(self, path: Path, columns: Mapping[str, Column] | None) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._columns = columns

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            whole = row if self._columns is None else {name: row.get(name) for name in self._columns}
            self._file.write(_json(whole) + "\n")

    def close(self) -> None:
        self._file.close()


class ParquetFile:
    """Apache Parquet: JSON values as JSON text, tokens and log-probabilities as lists of numbers."""

    def __init__(self, path: Path, columns: Mapping[str, Column]) -> None:
        import pyarrow as pa
        import pyarrow.parquet

        types = {
            Column.TEXT: pa.string(),
            Column.INTEGER: pa.int64(),
            Column.NUMBER: pa.float64(),
            Column.TRUTH: pa.bool_(),
            Column.JSON: pa.string(),
            Column.INTEGERS: pa.list_(pa.int32()),
            Column.NUMBERS: pa.list_(pa.float32()),
            Column.TRUTHS: pa.list_(pa.bool_()),
        }
        self._columns = columns
        self._schema = pa.schema([(name, types[column]) for name, column in columns.items()])
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._batches: list[pa.RecordBatch] = []

    def write(self, rows: Sequence[Row]) -> None:
        import pyarrow as pa

        if rows:
            arrays = [
                pa.array([_in_arrow(column, row.get(name)) for row in rows], self._schema.field(name).type)
                for name, column in self._columns.items()
            ]
            self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        if sum(batch.nbytes for batch in self._batches) >= _BATCH_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._batches:
            self._writer.write_table(pa.Table.from_batches(self._batches, self._schema).combine_chunks())
            self._batches = []


def _in_arrow(column: Column, value: Any) -> Any:
    if value is None:
        return None
    if column is Column.JSON:
        return _json(value)
    return value.encode("utf-8", "replace").decode() if column is Column.TEXT else value


def _json(value: Any) -> str:
    """JSON on one line; a number that JSON lacks is null, and text that is no UTF-8 is escaped."""
    try:
        return orjson.dumps(value, dict, orjson.OPT_SERIALIZE_NUMPY).decode()
    except TypeError:
        return json.dumps(_without_arrays(value), default=dict)


def _without_arrays(value: Any) -> Any:
    """A row or a value as the standard library can write it, which is slower and can write more."""
    if isinstance(value, Mapping):
        return {str(key): _without_arrays(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return _without_arrays(value.tolist())
    if isinstance(value, list | tuple):
        return [_without_arrays(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
