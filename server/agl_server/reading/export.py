"""`agl export`: a run's rollouts as tables, as episodes, or as conversations for other trainers.

Calls are read a group at a time, so that a run of any size takes about the same memory.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

from agl_core.errors import ConfigError
from agl_core.learning.rewards import AGENT_SOURCE
from agl_core.store import Store
from agl_core.types import Episode, Json, Mode, Rollout, RolloutState, Transition, are_equal
from agl_core.types.forms import parse_if_json, to_json
from agl_server.reading.explained import AttemptReport, RolloutEntry, entries_of, reports_of
from agl_server.reading.rollouts import Query, groups_of, matching
from agl_server.reading.runs import open_store

_ROW_GROUP = 256
"""Rows that Parquet writes together."""

Row: TypeAlias = Mapping[str, Any]


class Format(StrEnum):
    PARQUET = "parquet"
    EPISODES = "episodes"
    SFT = "sft"
    PREFERENCES = "preferences"


@dataclass(frozen=True, slots=True)
class ExportedRollout:
    entry: RolloutEntry
    report: AttemptReport
    """The report of the attempt that counts."""


@dataclass(slots=True)
class Export:
    out: Path
    rows: Counter[str] = field(default_factory=Counter)
    """By table; conversations count under the format's name."""
    left_out: Counter[str] = field(default_factory=Counter)
    """The number of rollouts that are not exported, by reason."""


async def export_run(run: Path, to: Format, out: Path, query: Query = Query()) -> Export:  # noqa: B008
    """Write the matching rollouts of a run to `out`, whole or not at all; ConfigError if none match, or `out` exists.

    Conversations leave evaluations out, unless the query names a mode or a split, or nothing else was recorded.
    """
    export = Export(out)
    async with open_store(run) as store:
        trains = to in (Format.SFT, Format.PREFERENCES) and query.mode is None and query.split is None
        held_out = not trains or not any([await store.rollouts(mode=m, newest=1) for m in Mode if not m.evaluates])
        with _appearing(out) as part, _writers(to, part) as writers:
            for group in groups_of(await store.rollouts(step=query.step, mode=query.mode)):
                exported = await _selected(store, group, query, held_out, export.left_out)
                for name, rows in _rows(to, exported, query.agent).items():
                    writers[name](rows)
                    export.rows[name] += len(rows)
            if not export.rows.total():
                why = "; ".join(f"{count} {reason}" for reason, count in export.left_out.items())
                raise ConfigError(
                    f"{run} has nothing to export to {to}" + (f" (rollouts left out: {why})" if why else "") + ". "
                    f"See agl rollouts {run}."
                )
    return export


async def _selected(
    store: Store, rollouts: Sequence[Rollout], query: Query, held_out: bool, left_out: Counter[str]
) -> list[ExportedRollout]:
    """The rollouts to export; the others are counted."""
    done = [r for r in rollouts if r.state is RolloutState.DONE and r.counted_attempt is not None]
    left_out["not done"] += len(rollouts) - len(done)
    entries = []
    for entry in await entries_of(store, done):
        if entry.superseded:
            left_out["superseded by a later restart"] += 1
        elif entry.rollout.mode.evaluates and not held_out:
            left_out["evaluations (--mode or --split takes them)"] += 1
        else:
            entries.append(entry)
    matches = await matching(store, query, entries)
    left_out["not what the filters ask for"] += len(entries) - len(matches)
    reports = await reports_of(store, [entry.rollout for entry in matches])
    return [ExportedRollout(report.entry, report.counted) for report in reports if report.counted is not None]


def _rows(to: Format, group: Sequence[ExportedRollout], agent: str | None) -> dict[str, list[Row]]:
    """The rows of a group's members, by table."""
    if to is Format.PARQUET:
        transitions = [row for exported in group for row in _transition_rows(exported, agent)]
        return {"transitions": transitions, "episodes": [_episode_row(exported) for exported in group]}
    if to is Format.EPISODES:
        return {to.value: [to_json(_episode(exported)) for exported in group]}
    if to is Format.SFT:
        return {to.value: [row for exported in group for row in _sft_rows(exported, agent)]}
    return {to.value: list(_preference_rows(group, agent))}


def _episode(exported: ExportedRollout) -> Episode:
    """The rollout with its rewards, as `agl_core.load_episodes` gives it back."""
    report, episode = exported.report, exported.report.episode
    return replace(
        episode,
        rewards=tuple(r for r in episode.rewards if r.call is None or r.source == AGENT_SOURCE),
        terminal=exported.entry.reward,
        transitions=tuple(replace(t, rewards=tuple(report.rewards_of(t))) for t in episode.transitions),
    )


# The tables: docs/data.md has what each column is. Rows have more than that; `_COLUMNS` says what is written.

_SHARED = (
    "run rollout restart:integer attempt:integer group member:integer step:integer mode split task ending "
    "terminal_reward:number"
)
_COLUMNS = {
    "transitions": f"{_SHARED} call choice:integer agent turn:integer agent_turn:integer "
    "lineage:integer lineage_kind parent housekeeping policy "
    "version:integer finish_reason temperature:number messages:json tools:json response:json prompt_ids:tokens "
    "response_ids:tokens logprobs:logprobs mask:mask parse_error prefix_broken tool_results:json rewards:json "
    "state:json reward:number credit:number advantage:number weight:number dropped",
    "episodes": f"{_SHARED} input:json metadata:json result:json rewards:json error "
    "transitions:integer tool_results:integer worker started:number ended:number",
}
"""The columns of each table with their types; those without one are texts."""


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _named(exported: ExportedRollout) -> dict[str, Any]:
    rollout, attempt = exported.entry.rollout, exported.report.attempt
    return {
        **_fields(rollout),
        "rollout": rollout.id,
        "attempt": attempt.attempt,
        "split": rollout.task.split,
        "task": rollout.task.id,
        "ending": exported.report.episode.ending,
        "terminal_reward": exported.entry.reward,
    }


def _episode_row(exported: ExportedRollout) -> Row:
    episode = exported.report.episode
    return {
        **_fields(exported.entry.rollout.task),
        **_fields(exported.report.attempt),
        **_named(exported),
        "rewards": [reward for reward in episode.rewards if reward.call is None],
        "transitions": len(episode.transitions),
        "tool_results": sum(len(t.tool_results) for t in episode.transitions) + len(episode.unjoined),
    }


def _transition_rows(exported: ExportedRollout, agent: str | None) -> Iterator[Row]:
    named = _named(exported)
    for turn in exported.report.turns:
        transition, rewards = turn.transition, turn.rewards
        if agent not in (None, transition.agent):
            continue
        yield {
            **({} if turn.record is None else _fields(turn.record)),
            **named,
            **_fields(transition),
            **transition.key._asdict(),
            "lineage": transition.lineage.number,
            "lineage_kind": transition.lineage.kind,
            "parent": transition.lineage.parent,
            "tool_results": [*transition.tool_results],
            "rewards": [*rewards, *turn.reported],
            "reward": sum(reward.value for reward in rewards),
        }


def _json(value: Any) -> str:
    return json.dumps(value, default=lambda inside: to_json(inside) if is_dataclass(inside) else dict(inside))


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A path beside `target`, which becomes `target` when the block ends well, and is removed if not."""
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already, and nothing is overwritten. Name another place, or remove it.")
    if not target.parent.is_dir():
        raise ConfigError(f"There is no folder {target.parent} to write {target.name} to. Make it first.")
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True) as part:
        yield Path(part) / target.name
        os.rename(Path(part) / target.name, target)


@contextmanager
def _writers(to: Format, path: Path) -> Iterator[Mapping[str, Callable[[Sequence[Row]], object]]]:
    """Functions that write rows, by table: to a folder of Parquet files, or to a file with a JSON object a line."""
    if to is Format.PARQUET:
        path.mkdir()
        with ExitStack() as files:
            yield {name: files.enter_context(_parquet(path / f"{name}.parquet", _COLUMNS[name])) for name in _COLUMNS}
    else:
        with path.open("w", encoding="utf-8") as file:
            yield {to.value: lambda rows: file.writelines(f"{_json(row)}\n" for row in rows)}


@contextmanager
def _parquet(path: Path, columns: str) -> Iterator[Callable[[Sequence[Row]], None]]:
    """A function that writes rows to an Apache Parquet file: JSON values as JSON text, tokens as lists of numbers."""
    import pyarrow as pa
    import pyarrow.parquet

    numbers = {"tokens": pa.int32(), "logprobs": pa.float32(), "mask": pa.bool_()}
    types = {"": pa.string(), "json": pa.string(), "integer": pa.int64(), "number": pa.float64()}
    types |= {kind: pa.list_(number) for kind, number in numbers.items()}
    kinds = {name: kind for name, _, kind in (column.partition(":") for column in columns.split())}
    schema = pa.schema([(name, types[kind]) for name, kind in kinds.items()])
    waiting: list[Row] = []

    def write(rows: Sequence[Row], least: int = _ROW_GROUP) -> None:
        waiting.extend({name: _cell(kind, row.get(name)) for name, kind in kinds.items()} for row in rows)
        if len(waiting) >= least:
            writer.write_table(pa.Table.from_pylist(waiting, schema))
            waiting.clear()

    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        yield write
        write((), least=1)


def _cell(kind: str, value: Any) -> Any:
    """A value as its column has it. Agents' text need not be UTF-8, which Parquet wants."""
    if kind == "json":
        return None if value in (None, ()) else _json(value)
    return str(value).encode("utf-8", "replace").decode() if isinstance(value, str) else value


# Conversations are what TRL takes: arguments of tool calls as objects, tools as JSON text.


def _sft_rows(exported: ExportedRollout, agent: str | None) -> Iterator[Row]:
    """Prompt and reply of each transition: `prompt`, `completion` and `tools`."""
    for transition in _usable(exported, agent):
        yield {**_prompt(transition), "completion": [_message(transition.response)]}


def _preference_rows(group: Sequence[ExportedRollout], agent: str | None) -> Iterator[Row]:
    """For each prompt that members share, the reply with the best mean terminal reward over that with the worst."""
    by_prompt: dict[str, dict[str, list[tuple[Transition, float]]]] = {}
    for exported in group:
        if exported.entry.reward is not None:
            for transition in _usable(exported, agent):
                prompt = json.dumps([transition.agent, _prompt(transition)], sort_keys=True)
                replies = by_prompt.setdefault(prompt, {})
                replies.setdefault(_identity(transition.response), []).append((transition, exported.entry.reward))
    for replies in by_prompt.values():
        worth = {reply: sum(reward for _, reward in rows) / len(rows) for reply, rows in replies.items()}
        if not are_equal(worth.values()):
            best, worst = (replies[pick(worth, key=worth.__getitem__)][0][0] for pick in (max, min))
            yield {
                **_prompt(best),
                "chosen": [_message(best.response)],
                "rejected": [_message(worst.response)],
            }


def _usable(exported: ExportedRollout, agent: str | None) -> Iterator[Transition]:
    """The selected transitions that have a conversation and a reply."""
    for transition in exported.report.episode.transitions:
        has_reply = transition.response.get("content") or transition.response.get("tool_calls")
        if agent in (None, transition.agent) and transition.messages and has_reply:
            yield transition


def _prompt(transition: Transition) -> dict[str, Any]:
    return {
        "prompt": [_message(message) for message in transition.messages],
        "tools": json.dumps(list(transition.tools)) if transition.tools else None,
    }


def _message(message: Mapping[str, Json]) -> dict[str, Json]:
    """A message as chat templates take it: without keys that say nothing, and arguments as objects."""
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_tool_call(tool_call) for tool_call in kept["tool_calls"]]
    return kept


def _tool_call(tool_call: Any) -> Json:
    try:
        function = tool_call["function"]
        arguments = parse_if_json(function["arguments"])
    except (TypeError, LookupError):
        return tool_call
    return {**tool_call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else tool_call


def _identity(response: Mapping[str, Json]) -> str:
    """Two replies are the same if their text and tool calls are, whatever the ids of these."""
    message = _message(response)
    functions = [
        call.get("function") if isinstance(call, Mapping) else call for call in message.get("tool_calls") or ()
    ]
    return json.dumps([message.get("content"), functions], sort_keys=True)
