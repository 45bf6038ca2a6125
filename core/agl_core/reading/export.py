"""`agl export`: a run's rollouts as tables, or as conversations for other trainers.

The store is read a page at a time, so that a run of any size takes the same memory.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agl_core.errors import ConfigError
from agl_core.reading.explained import AttemptReport, attempt_reports, counted_of, reward_weights
from agl_core.reading.metrics import read_metrics
from agl_core.reading.rollouts import Query, RolloutEntry, entries_of
from agl_core.reading.runs import open_store
from agl_core.reading.tables import TABLES, JsonlFile, ParquetFile, Row, TableFile, episode_of, metrics_rows, rows_of
from agl_core.reading.words import plain
from agl_core.returns import are_equal
from agl_core.store.files import is_written
from agl_core.store.interface import Store
from agl_core.types import Json, Mode, Rollout, RolloutState, Transition, Verdict
from agl_core.types.forms import to_json

ABOUT = "export.json"
"""Beside the tables: which run they are of, and the weights of its reward rules."""
EPISODES = "episodes.jsonl"
_PAGE = 32
"""Rollouts that are in memory at a time."""


class Format(StrEnum):
    """The formats of `agl export`."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    SFT = "sft"
    PREFERENCES = "preferences"

    @property
    def is_tables(self) -> bool:
        """A folder of tables; the others are one file of conversations."""
        return self in (Format.PARQUET, Format.JSONL)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rollouts, and which of their transitions; None: any."""

    steps: tuple[int, int] | None = None
    """The first and the last step, both included."""
    mode: Mode | None = None
    split: str | None = None
    low: float | None = None
    """The least terminal reward."""
    high: float | None = None
    """The highest terminal reward; it is included."""
    agent: str | None = None
    """One that made a call. Of a transition: the one that made its call."""
    verdict: Verdict | None = None
    """Of its health."""
    held_out: bool = True
    """Evaluations are selected; if False, only where nothing else was recorded."""


@dataclass(slots=True)
class LeftOut:
    """How many rollouts are not exported, by reason."""

    unfinished: int = 0
    """They are not done, or have no attempt that counts."""
    superseded: int = 0
    """A later restart of the run resumed from before their step."""
    unwanted: int = 0
    """The filters do not ask for them."""
    held_out: int = 0
    """They are evaluations, which are not to be trained on."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One rollout that leaves the run."""

    entry: RolloutEntry
    report: AttemptReport
    """Of the attempt that counts."""

    @property
    def rollout(self) -> Rollout:
        return self.entry.rollout


@dataclass(slots=True)
class Export:
    """The files that were written."""

    out: Path
    rows: dict[str, int]
    """By table; of conversations under the format's name."""
    left_out: LeftOut = field(default_factory=LeftOut)
    pruned: int = 0
    """Rollouts whose calls were pruned: their transitions have no texts and no tokens."""


async def export_run(
    run: Path, to: Format, out: Path, selection: Selection, tables: Collection[str] = tuple(TABLES)
) -> Export:
    """Write the selected data of the run in the folder `run` to `out`, which is made: whole, or not at all.

    ConfigError if the run is still written (unless the selection names steps that are complete), if nothing is
    selected, or if there is something at `out`.
    """
    _check_still(run, selection)
    if not to.is_tables and tuple(tables) != tuple(TABLES):
        raise ConfigError(f"--table chooses tables, and {to.value} has none. Leave it out.")
    async with open_store(run) as store:
        export = Export(out, {})
        selected = _Selected(store, selection, export.left_out)
        with _appearing(out) as part:
            if to.is_tables:
                await _write_tables(run, to, part, selected, [name for name in TABLES if name in tables], export)
            else:
                await _write_conversations(to, part, selected, export)
            if not any(count for name, count in export.rows.items() if name != "metrics"):
                raise ConfigError(_nothing(run, to, export.left_out))
    return export


class _Selected:
    """The selected rollouts of a store; the others are counted as they are read."""

    def __init__(self, store: Store, selection: Selection, left_out: LeftOut) -> None:
        self.store, self.selection, self._left_out = store, selection, left_out
        self._has_others: bool | None = None

    async def pages(self) -> AsyncIterator[list[Exported]]:
        """All of them, some at a time, in the order in which they were made."""
        after: str | None = None
        first, last = self.selection.steps or (None, None)
        one = first if first == last else None
        while rollouts := await self.store.rollouts(step=one, mode=self.selection.mode, after=after, limit=_PAGE):
            after = rollouts[-1].id
            if first is not None and last is not None:
                rollouts = [rollout for rollout in rollouts if first <= rollout.step <= last]
            yield await self.among(rollouts, self._left_out)

    async def members(self, rollout: Rollout) -> list[Exported]:
        """The selected members of a rollout's group, itself included."""
        members = await self.store.rollouts(run=rollout.run, group=rollout.group, mode=rollout.mode)
        return await self.among(
            [m for m in members if (m.restart, m.step) == (rollout.restart, rollout.step)], LeftOut()
        )

    async def among(self, rollouts: Sequence[Rollout], left_out: LeftOut) -> list[Exported]:
        """Those among these rollouts that are selected."""
        asked = self.selection
        done = [r for r in rollouts if r.state is RolloutState.DONE and r.counted_attempt is not None]
        left_out.unfinished += len(rollouts) - len(done)
        query = Query(split=asked.split, low=asked.low, high=asked.high)
        entries = {}
        for entry in await entries_of(self.store, done):
            if entry.superseded:
                left_out.superseded += 1
            elif entry.rollout.mode.evaluates and not asked.held_out and await self._has_more_than_evaluations():
                left_out.held_out += 1
            elif not query.takes(entry):
                left_out.unwanted += 1
            else:
                entries[entry.rollout.id] = entry
        counted = await counted_of(self.store, [entry.rollout for entry in entries.values()])
        left_out.unfinished += len(entries) - len(counted)
        exported = []
        for report in await attempt_reports(self.store, counted):
            agents = {transition.agent for transition in report.episode.transitions}
            if asked.agent in (None, *agents) and asked.verdict in (None, report.health.verdict):
                exported.append(Exported(entries[report.attempt.rollout], report))
            else:
                left_out.unwanted += 1
        return exported

    async def _has_more_than_evaluations(self) -> bool:
        """Whether the run trained, or was used: the recordings of `agl run` are of a mode of evaluations."""
        if self._has_others is None:
            modes = [mode for mode in Mode if not mode.evaluates]
            self._has_others = any([await self.store.rollouts(mode=mode, newest=1) for mode in modes])
        return self._has_others


def _check_still(run: Path, selection: Selection) -> None:
    if not is_written(run / "store.sqlite"):
        return
    last = max((line.step for line in read_metrics(run) if line.kind == "train"), default=0)
    if selection.steps is None or selection.steps[1] > last:
        complete = f"choose complete steps: --step 1-{last}" if last else "none of its steps is complete yet"
        raise ConfigError(f"The run {run} is still written. Wait for its end, or {complete}.")


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A place beside `target` to write to, which becomes `target` when the block ends well, and is removed if not."""
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already, and nothing is overwritten. Name another place, or remove it.")
    if not target.parent.is_dir():
        raise ConfigError(f"There is no folder {target.parent} to write {target.name} to. Make it first.")
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True) as part:
        yield Path(part) / target.name
        os.rename(Path(part) / target.name, target)


async def _write_tables(
    run: Path, to: Format, folder: Path, selected: _Selected, tables: list[str], export: Export
) -> None:
    with _table_files(to, folder, tables) as files:
        export.rows.update(dict.fromkeys(tables, 0))
        async for page in selected.pages():
            export.pruned += sum(exported.report.pruned for exported in page)
            rows = [rows_of(e.rollout, e.entry.reward, e.report, selected.selection.agent) for e in page]
            for name in [name for name in tables if name != "metrics"]:
                of_table = [row for of_rollout in rows for row in of_rollout[name]]
                if to is Format.JSONL and name == "episodes":
                    of_table = [to_json(episode_of(e.report, e.entry.reward)) for e in page]
                files[name].write(of_table)
                export.rows[name] += len(of_table)
        if "metrics" in files:
            metrics = list(metrics_rows(read_metrics(run), selected.selection.steps))
            files["metrics"].write(metrics)
            export.rows["metrics"] = len(metrics)
    weights: dict[str, float] = {}
    for restart in await selected.store.runs():
        weights |= reward_weights(restart)
    about = {"agl": version("agl-core"), "run": run.name, "reward_weights": weights, "rows": export.rows}
    (folder / ABOUT).write_text(json.dumps(plain({**about, "selection": selected.selection}), indent=2) + "\n")


@contextmanager
def _table_files(to: Format, folder: Path, tables: list[str]) -> Iterator[dict[str, TableFile]]:
    """A file for each table in a new folder."""
    folder.mkdir()
    with ExitStack() as stack:
        files: dict[str, TableFile] = {}
        for name in tables:
            if to is Format.JSONL:
                # Episodes are whole here, and not rows.
                files[name] = JsonlFile(folder / f"{name}.jsonl", None if name == "episodes" else TABLES[name])
            else:
                files[name] = ParquetFile(folder / f"{name}.parquet", TABLES[name])
            stack.callback(files[name].close)
        yield files


async def _write_conversations(to: Format, path: Path, selected: _Selected, export: Export) -> None:
    export.rows[to.value] = 0
    to_come: dict[tuple[str, int, str, int], int] = {}
    """How many members of a group that was written come later; it is forgotten after its last."""
    file = JsonlFile(path, None)
    try:
        async for page in selected.pages():
            export.pruned += sum(exported.report.pruned for exported in page)
            for exported in page:
                rollout = exported.rollout
                group = (rollout.run, rollout.restart, rollout.group, rollout.step)
                rows: list[Row] = []
                if to is Format.SFT:
                    rows = list(_sft_rows(exported, selected.selection))
                else:
                    if group not in to_come:
                        members = await selected.members(rollout)
                        to_come[group] = len(members)
                        rows = list(_preference_rows(members, selected.selection))
                    to_come[group] -= 1
                    if not to_come[group]:
                        del to_come[group]
                file.write(rows)
                export.rows[to.value] += len(rows)
    finally:
        file.close()


def _nothing(run: Path, to: Format, left_out: LeftOut) -> str:
    reasons = {
        "not done": left_out.unfinished,
        "superseded by a later restart": left_out.superseded,
        "evaluations": left_out.held_out,
        "not what the filters ask for": left_out.unwanted,
    }
    why = "; ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
    missing = "no pair of replies" if to is Format.PREFERENCES else "no rollout"
    return (
        f"{run} has {missing} to export" + (f" (rollouts left out: {why})" if why else "") + ". "
        f"See agl rollouts {run}."
    )


# Conversations are what TRL takes: arguments of tool calls as objects, tools as JSON text.


def _sft_rows(exported: Exported, selection: Selection) -> Iterator[Row]:
    """Prompt and reply of each transition: `prompt`, `completion` and `tools`."""
    for transition in _usable(exported, selection.agent):
        yield {**_prompt(transition), "completion": [_message(transition.response)]}


def _preference_rows(group: Sequence[Exported], selection: Selection) -> Iterator[Row]:
    """`prompt`, `tools`, `chosen` and `rejected`, for each prompt that members of a group share.

    A reply is worth the mean terminal reward of the rollouts that gave it. The best reply is chosen over the worst;
    where all are worth the same there is no pair.
    """
    by_prompt: dict[str, dict[str, list[tuple[Transition, float]]]] = {}
    for exported in group:
        if exported.entry.reward is not None:
            for transition in _usable(exported, selection.agent):
                prompt = json.dumps([transition.agent, _prompt(transition)], sort_keys=True)
                replies = by_prompt.setdefault(prompt, {})
                replies.setdefault(_identity(transition.response), []).append((transition, exported.entry.reward))
    for replies in by_prompt.values():
        worth = {reply: sum(reward for _, reward in rows) / len(rows) for reply, rows in replies.items()}
        if not are_equal(worth.values()):
            best, worst = (replies[pick(worth, key=worth.__getitem__)][0][0] for pick in (max, min))
            yield {
                **_prompt(next(iter(replies.values()))[0][0]),
                "chosen": [_message(best.response)],
                "rejected": [_message(worst.response)],
            }


def _usable(exported: Exported, agent: str | None) -> Iterator[Transition]:
    """The selected transitions that have a conversation and a reply: not those that were pruned."""
    for transition in exported.report.episode.transitions:
        has_reply = transition.response.get("content") or transition.response.get("tool_calls")
        if agent in (None, transition.agent) and not exported.report.pruned and transition.messages and has_reply:
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
        arguments = json.loads(function["arguments"])
    except (TypeError, LookupError, ValueError):
        return tool_call
    return {**tool_call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else tool_call


def _identity(response: Mapping[str, Json]) -> str:
    """Two replies are the same if their text and tool calls are, whatever the ids of these."""
    message = _message(response)
    functions = [
        call.get("function") if isinstance(call, Mapping) else call for call in message.get("tool_calls") or ()
    ]
    return json.dumps([message.get("content"), functions], sort_keys=True)
