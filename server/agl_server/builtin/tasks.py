"""Tasks from files, data sets and other runs: the task sources "jsonl", "csv", "hf", "recorded" and "mixture".

A row's other columns are its task's metadata, which rewards see and the agent does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeAlias

import orjson
from pydantic import Field, model_validator

from agl_core.config.load import CONFIG_FILE
from agl_core.config.models import MixtureOptions
from agl_core.config.resolve import ChosenComponent
from agl_core.config.sections import Section
from agl_core.errors import ConfigError, EpisodesError, nearest
from agl_core.protocols import RecordedTasks, TaskSource, train_index
from agl_core.types import RecordedRollout, Rollout, Task
from agl_core.types.forms import dump_json, load_json
from agl_server.reading.files import is_recording, load_dataset, read_rows


class ColumnOptions(Section):
    """The roles of a table's columns, or of objects' keys, in a task."""

    columns: dict[str, str | tuple[str, ...]] = Field({})
    """Names of the task's `input`, `id` and metadata, each with the source's name for it. An input of several columns
    is an object that has each; without its id, a task has its row's number."""

    @model_validator(mode="after")
    def _only_inputs_are_several(self) -> Self:
        if wrong := [name for name, column in self.columns.items() if not isinstance(column, str) and name != "input"]:
            raise ValueError(f"columns: '{wrong[0]}' is one column; only 'input' can be several")
        return self


class FileOptions(ColumnOptions):
    """The file, and its columns."""

    path: Path
    """The file, relative to the configuration file."""


class DatasetOptions(ColumnOptions):
    """The dataset, and its columns."""

    dataset: str = Field(min_length=1)
    """A Parquet file or a folder, relative to the configuration file, or a name on the Hugging Face hub."""
    subset: str | None = None
    """Which of the dataset's configurations, if it has several."""
    split: str = Field("train", min_length=1)
    """Which of the dataset's splits."""


class RowTasks:
    """A task for each row, in their order; every row is checked at once. ConfigError names a wrong row and a remedy."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        options: ColumnOptions,
        where: str,
        places: Sequence[str] | None = None,
    ) -> None:
        if not len(rows):
            raise ConfigError(f"{where} has no tasks.")
        self._rows, self._where, self._places = rows, where, places
        names = {"input": "input", "id": "id", **options.columns}
        self._input, self._id = names.pop("input"), names.pop("id")
        self._names = {column: name for name, column in names.items()}
        known: dict[str, str] = {}
        for index in range(len(rows)):
            place = known.setdefault(self.task(index).id, self._place_of(index))
            if place != self._place_of(index):
                raise ConfigError(
                    f"{self._place_of(index)}: the id '{self.task(index).id}' is also that of {place}. Ids must be "
                    f"unique; name another column by `columns.id`, or one that is not there to take the row's number."
                )

    @property
    def size(self) -> int:
        return len(self._rows)

    def task(self, index: int) -> Task:
        row = {name: self._json(index, name, value) for name, value in self._rows[index].items()}
        inputs = (self._input,) if isinstance(self._input, str) else self._input
        for column in (*inputs, *self._names):
            if column not in row:
                raise ConfigError(
                    f"{self._place_of(index)}: has no '{column}'. {nearest(str(column), row)} Say what it is called, "
                    f'for instance columns = {{ input = "question" }}.'
                )
        task_id = row.pop(str(self._id), self._place_of(index).rpartition(" ")[2])
        if not isinstance(task_id, str | int) or task_id == "":
            raise ConfigError(f"{self._place_of(index)}: '{self._id}' must be a text or an integer, not {task_id!r}.")
        values = {column: row.pop(column) for column in inputs}
        metadata = {self._names.get(column, column): value for column, value in row.items()}
        return Task(str(task_id), values[self._input] if isinstance(self._input, str) else values, metadata=metadata)

    def _place_of(self, index: int) -> str:
        return f"{self._where}, {self._places[index] if self._places else f'row {index + 1}'}"

    def _json(self, index: int, name: str, value: Any) -> Any:
        """A value as JSON has it: a date is its text."""
        if value is None or isinstance(value, str | int):
            return value
        try:
            return load_json(dump_json(value))
        except ValueError:
            raise ConfigError(
                f"{self._place_of(index)}: '{name}' is a {type(value).__name__}, which JSON does not have. Make the "
                f"column text or numbers, or leave it out."
            ) from None


def jsonl_tasks(options: FileOptions, folder: Path, seed: int) -> RowTasks:
    """Tasks from a file with one JSON object per line; keys beside input and id are the task's metadata.

        {"id": "a1", "question": "2 + 3?", "result": "5"}     # with columns = { input = "question" }

    Blank lines are skipped.
    """
    return _file_tasks(options, folder, is_csv=False)


def csv_tasks(options: FileOptions, folder: Path, seed: int) -> RowTasks:
    """Tasks from a CSV file with a header; all values are texts."""
    return _file_tasks(options, folder, is_csv=True)


def _file_tasks(options: FileOptions, folder: Path, *, is_csv: bool) -> RowTasks:
    path = folder / options.path.expanduser()
    if not path.exists():
        raise ConfigError(
            f"The tasks {path} do not exist. Paths are relative to the configuration file, or to its `folder`."
        )
    try:
        rows = dict(read_rows(path, is_csv=is_csv))
    except EpisodesError as error:
        raise ConfigError(f"The tasks cannot be read: {error}") from error
    return RowTasks([_object(f"{path}, {place}", row) for place, row in rows.items()], options, str(path), [*rows])


def _object(place: str, row: Any) -> dict[str, Any]:
    try:
        value: Any = orjson.loads(row) if isinstance(row, str) else row
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{place}: not a JSON object ({error}). Each line must be one.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: must be a JSON object, not {type(value).__name__}.")
    return value


def dataset_tasks(options: DatasetOptions, folder: Path, seed: int) -> RowTasks:
    """Tasks from a Parquet file, or a Hugging Face dataset by its folder or name (needs `agl-server[export]`)."""
    path, where = folder / Path(options.dataset).expanduser(), f"The dataset '{options.dataset}'"
    try:
        rows = load_dataset(path, options.dataset, options.subset, options.split)
    except ValueError as error:
        raise ConfigError(
            f"{where}, split '{options.split}', cannot be loaded ({error}). It must be a folder "
            f"(looked for {path}) or a name on the Hugging Face hub."
        ) from error
    return RowTasks(rows, options, where)


class RecordedOptions(Section):
    """The runs, and which of their rollouts."""

    run: Path | tuple[Path, ...]
    """The folder of the run, as `agl import`, `agl run` or `agl train` made it, relative to the configuration file; or
    a file that `agl import` takes; or several of them."""
    split: str | None = None
    """Only tasks of this split; absent: those of training if the run trained, otherwise all."""
    without_logprobs: bool = False
    """Train also on calls whose log-probabilities are not known, as if the policy itself had sampled them: there are no
    importance weights. Calls without token ids, or with those of another model, are tokenised by the policy's own chat
    template. Otherwise they are dropped and counted. `sft`, `rft` and `dpo` always do so."""


Reader: TypeAlias = Callable[[Sequence[Rollout]], Awaitable[list[RecordedRollout]]]
"""Reads rollouts of one run or file."""


class RecordedRuns:
    """Rollouts that another run recorded, to train on instead of running the agent: see `RecordedTasks`.

    ConfigError if there is no such run, or it has none; EpisodesError names what is wrong with a file.
    """

    def __init__(self, options: RecordedOptions, folder: Path, seed: int) -> None:
        # Agents' processes register components too, and need nothing that reads runs.
        from agl_server.reading.importing import RecordedFile
        from agl_server.reading.rollouts import RecordedRun, groups_of

        self.without_logprobs, self.has_preferences = options.without_logprobs, False
        self._groups: list[tuple[Reader, Sequence[Rollout]]] = []
        """By task: its rollouts, and what reads them."""
        for run in (options.run,) if isinstance(options.run, Path) else options.run:
            path = folder / run.expanduser()
            if not is_recording(path) and not (path / CONFIG_FILE).is_file():
                raise ConfigError(
                    f"{path} is neither a run's folder (it has no {CONFIG_FILE}) nor a file. Paths are relative to the "
                    f"configuration file, or to its `folder`."
                )
            recorded: RecordedFile | RecordedRun = RecordedFile(path) if is_recording(path) else RecordedRun(path)
            trained = [rollout for rollout in recorded.rollouts if rollout.mode.trains]
            of_split = [rollout for rollout in recorded.rollouts if rollout.task.split == options.split]
            rollouts = (trained or recorded.rollouts) if options.split is None else of_split
            if not rollouts:
                which = "that is done" if options.split is None else f"of the split '{options.split}' that is done"
                raise ConfigError(f"{path} has no rollout {which}, so there is nothing to train on.")
            self.has_preferences |= recorded.has_preferences
            self._groups += [(recorded.read, group) for group in groups_of(rollouts)]

    @property
    def size(self) -> int:
        return len(self._groups)

    def task(self, index: int) -> Task:
        """The task at this index, in the order in which their first rollouts were recorded."""
        return self._groups[index][1][0].task

    def members(self, index: int) -> int:
        return len(self._groups[index][1])

    async def groups(self, indices: Sequence[int]) -> list[list[RecordedRollout]]:
        """The rollouts of the tasks at these indices; each is read once, though two epochs may meet in a step."""
        groups, by_reader = [self._groups[index] for index in indices], defaultdict[Reader, dict[str, Rollout]](dict)
        for read, rollouts in groups:
            by_reader[read] |= {rollout.id: rollout for rollout in rollouts}
        known = {(read, it.rollout.id): it for read, by_id in by_reader.items() for it in await read([*by_id.values()])}
        return [[known[read, rollout.id] for rollout in rollouts] for read, rollouts in groups]


_CYCLE = 1000
"""About the tasks of a mixture after which the order of its parts repeats: weights are rounded to a thousandth."""


class Mixture:
    """Tasks of several task sources (`[tasks.NAME.parts.PART]`, each with a `source`), in turn by their weights.

    Each part has its share of every stretch of tasks, to within a task or two. It never ends: a finite part begins
    anew, in another order. A task's id is `PART/ID`, and `part` of its metadata is the part, unless it has another.
    ConfigError if a part has no tasks, or is of recorded rollouts.
    """

    size = None

    def __init__(self, options: MixtureOptions, folder: Path, seed: int, parts: Mapping[str, ChosenComponent]) -> None:
        self._seed = seed
        self._parts: dict[str, TaskSource] = {name: part.build(folder, seed) for name, part in parts.items()}
        for name, part in self._parts.items():
            if isinstance(part, RecordedTasks):
                raise ConfigError(
                    f"The part '{name}' of a mixture is of recorded rollouts, which are trained on as they are. Make "
                    f"it the only source of [tasks.train], or leave it out."
                )
            if part.size == 0:
                raise ConfigError(f"The part '{name}' of a mixture has no tasks. Fill it, or leave it out.")
            part.task(0)  # What is wrong with a part shows before anything starts.
        total = sum(part.weight for part in options.parts.values())
        self._counts = {name: max(1, round(_CYCLE * part.weight / total)) for name, part in options.parts.items()}
        turns = sorted(((n + 0.5) / count, name, n) for name, count in self._counts.items() for n in range(count))
        self._turns = [(name, n) for _, name, n in turns]

    def task(self, index: int) -> Task:
        cycle, turn = divmod(index, len(self._turns))
        name, number = self._turns[turn]
        part = self._parts[name]
        task = part.task(train_index(part, cycle * self._counts[name] + number, self._seed))
        return replace(task, id=f"{name}/{task.id}", metadata={"part": name, **task.metadata})
