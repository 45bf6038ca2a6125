"""`agl export`: a run's data as files of other tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from agl_core.analysis.curves.metrics import read_metrics
from agl_core.analysis.export.conversations import preference_rows, sft_rows
from agl_core.analysis.export.files import CsvFile, DatasetFolder, JsonlFile, ParquetFile, TableFile, appearing
from agl_core.analysis.export.formats import Format
from agl_core.analysis.export.selecting import Exported, LeftOut, Selected, Selection
from agl_core.analysis.export.tables import TABLES, Row, episode_of, metrics_rows, rows_of
from agl_core.analysis.rollouts import reward_weights
from agl_core.analysis.runs import open_store
from agl_core.analysis.text.plain import plain
from agl_core.errors import ConfigError
from agl_core.store.files import is_written
from agl_core.store.interface import Store
from agl_core.types import Rollout
from agl_core.types.forms import to_json

ABOUT = "export.json"
"""Beside the tables: which run they are of, and the weights of its reward rules."""
EPISODES = "episodes.jsonl"


_ENDINGS = {Format.PARQUET: ".parquet", Format.JSONL: ".jsonl", Format.CSV: ".csv", Format.HF: ""}


@dataclass(frozen=True, slots=True)
class Export:
    """What was written."""

    out: Path
    rows: Mapping[str, int]
    """By table; of conversations under the format's name."""
    left_out: LeftOut
    pruned: int
    """Rollouts whose calls were pruned: their transitions have no texts and no tokens."""


async def export_run(
    run: Path, to: Format, out: Path, selection: Selection, tables: Collection[str] = tuple(TABLES)
) -> Export:
    """Write the selected data of the run in the folder `run` to `out`, which is made: whole, or not at all.

    The memory that it takes does not grow with the run. ConfigError if the run is still written (unless the selection
    names steps that are complete), if nothing is selected, or if there is something at `out`.
    """
    _check_still(run, selection)
    if not to.is_tables and tuple(tables) != tuple(TABLES):
        raise ConfigError(f"--table chooses tables, and {to.value} has none. Leave it out.")
    async with open_store(run) as store:
        selected = Selected(store, selection)
        with appearing(out) as part:
            written = _Written({}, 0)
            if to.is_tables:
                part.mkdir()
                await _write_tables(run, to, part, selected, [name for name in TABLES if name in tables], written)
                about = await _about(run, store, selection, written)
                (part / ABOUT).write_text(json.dumps(plain(about), indent=2) + "\n")
                if to is Format.HF:
                    (part / "README.md").write_text(_card(run.name, written.rows))
            else:
                await _write_conversations(to, part, selected, written)
            if not any(count for name, count in written.rows.items() if name != "metrics"):
                raise ConfigError(_nothing(run, to, selected.left_out))
    return Export(out, written.rows, selected.left_out, written.pruned)


@dataclass(slots=True)
class _Written:
    rows: dict[str, int]
    pruned: int


def _check_still(run: Path, selection: Selection) -> None:
    if not is_written(run / "store.sqlite"):
        return
    last = max((line.step for line in read_metrics(run) if line.kind == "train"), default=0)
    if selection.steps is None or selection.steps[1] > last:
        complete = f"choose complete steps: --step 1-{last}" if last else "none of its steps is complete yet"
        raise ConfigError(f"The run {run} is still written. Wait for its end, or {complete}.")


async def _write_tables(
    run: Path, to: Format, folder: Path, selected: Selected, tables: list[str], written: _Written
) -> None:
    with ExitStack() as stack:
        files = {name: _opened(to, folder / f"{name}{_ENDINGS[to]}", name) for name in tables}
        for file in files.values():
            stack.callback(file.close)
        written.rows.update(dict.fromkeys(tables, 0))
        async for page in selected.pages():
            written.pruned += sum(each.report.pruned for each in page)
            rows = [rows_of(each, selected.selection) for each in page]
            for name in [name for name in tables if name != "metrics"]:
                of_table = [row for each in rows for row in each[name]]
                if to is Format.JSONL and name == "episodes":
                    of_table = [to_json(episode_of(each)) for each in page]
                files[name].write(of_table)
                written.rows[name] += len(of_table)
        if "metrics" in files:
            metrics = list(metrics_rows(read_metrics(run), selected.selection.steps))
            files["metrics"].write(metrics)
            written.rows["metrics"] = len(metrics)


def _opened(to: Format, path: Path, table: str) -> TableFile:
    columns = TABLES[table]
    if to is Format.JSONL:
        return JsonlFile(path, None if table == "episodes" else columns)
    if to is Format.CSV:
        return CsvFile(path, columns)
    return ParquetFile(path, columns) if to is Format.PARQUET else DatasetFolder(path, columns)


async def _write_conversations(to: Format, path: Path, selected: Selected, written: _Written) -> None:
    file = JsonlFile(path, None)
    written.rows[to.value] = 0
    try:
        async for rows in _conversations(to, selected, written):
            file.write(rows)
            written.rows[to.value] += len(rows)
    finally:
        file.close()


async def _conversations(to: Format, selected: Selected, written: _Written) -> AsyncIterator[list[Row]]:
    selection = selected.selection
    left: dict[tuple[str, int, str, int], int] = {}
    """Of groups that were written: how many of their members come later. One is forgotten after its last."""
    async for page in selected.pages():
        written.pruned += sum(each.report.pruned for each in page)
        for each in page:
            rollout = each.rollout
            if to is Format.SFT:
                yield list(sft_rows(each, selection))
                continue
            group = (rollout.run, rollout.restart, rollout.group, rollout.step)
            if group not in left:
                members = await _group_of(selected, rollout)
                left[group] = len(members)
                yield list(preference_rows(members, selection))
            left[group] -= 1
            if not left[group]:
                del left[group]


async def _group_of(selected: Selected, rollout: Rollout) -> list[Exported]:
    """The selected members of a rollout's group, itself included."""
    found = await selected.store.rollouts(run=rollout.run, group=rollout.group, mode=rollout.mode)
    members = [each for each in found if each.restart == rollout.restart and each.step == rollout.step]
    return await selected.of(members, LeftOut())


async def _about(run: Path, store: Store, selection: Selection, written: _Written) -> Mapping[str, object]:
    weights: dict[str, float] = {}
    for each in await store.runs():
        weights |= reward_weights(each)
    return {
        "agl": version("agl-core"),
        "run": run.name,
        "reward_weights": weights,
        "selection": selection,
        "rows": written.rows,
    }


def _card(run: str, rows: Mapping[str, int]) -> str:
    """The card by which `load_dataset(FOLDER, TABLE)` finds the tables."""
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/data-*.arrow\n" for name in rows
    )
    return f"---\nconfigs:\n{configs}---\n\nThe run `{run}`, exported by agl: {', '.join(rows)}.\n"


def _nothing(run: Path, to: Format, left_out: LeftOut) -> str:
    reasons = {
        "not done": left_out.unfinished,
        "superseded by a later restart": left_out.superseded,
        "evaluations": left_out.held_out,
        "not what the filters ask for": left_out.unwanted,
    }
    why = "; ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
    what = "no pair of replies" if to is Format.PREFERENCES else "no rollout"
    return (
        f"{run} has {what} to export" + (f" (rollouts left out: {why})" if why else "") + f". See agl rollouts {run}."
    )
