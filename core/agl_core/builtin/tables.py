"""Tasks from tables: the task sources "csv", "parquet" and "hf" (Hugging Face datasets)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agl_core.builtin.tasks import read_utf8
from agl_core.errors import ConfigError, nearest
from agl_core.types import Task
from agl_core.types.forms import dump_json, load_json


class _Columns(BaseModel):
    """What the columns of a table are to a task."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input_field: str | tuple[str, ...] = Field(
        "input", description="The column of the task's input; of several, the input is an object that has each."
    )
    id_field: str = Field("id", min_length=1, description="The column of the task's id; without it, the row number.")
    columns: dict[str, str] = Field(
        {},
        description="Other names for columns: the name here, and what the table calls it. All columns that are neither "
        "input nor id are the task's metadata.",
    )


class FileOptions(_Columns):
    """The file, and its columns."""

    path: Path = Field(description="The file, relative to the configuration file.")


class DatasetOptions(_Columns):
    """The dataset, and its columns."""

    dataset: str = Field(
        min_length=1, description="A folder, relative to the configuration file, or a name on the Hugging Face hub."
    )
    subset: str | None = Field(None, description="Which of the dataset's configurations, if it has several.")
    split: str = Field("train", min_length=1, description="Which of the dataset's splits.")


class TableTasks:
    """The tasks of a table, a row each, in its order."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], options: _Columns, where: str) -> None:
        """ConfigError names the place (`where`) and the remedy if the columns are not as the options say."""
        if not len(rows):
            raise ConfigError(f"{where} has no rows, so there are no tasks.")
        self._rows, self._options, self._where = rows, options, where
        inputs = (options.input_field,) if isinstance(options.input_field, str) else options.input_field
        found = self._named(rows[0])
        for name in (*inputs, *options.columns):
            if name not in found:
                known = nearest(options.columns.get(name, name), rows[0])
                raise ConfigError(f"{where} has no column '{options.columns.get(name, name)}'. {known}")
        self._inputs = inputs
        seen: dict[str, int] = {}
        for number in range(1, len(rows) + 1) if options.id_field in found else ():
            task_id = self._id(number)
            if task_id in seen:
                raise ConfigError(
                    f"{where}, row {number}: the id '{task_id}' is that of row {seen[task_id]} too. Ids must be "
                    f"unique; set id_field to another column, or to one that is not there to take the row number."
                )
            seen[task_id] = number
        self.task(0)  # That its values can be a task's is found out at once.

    @property
    def size(self) -> int:
        return len(self._rows)

    def task(self, index: int) -> Task:
        row = self._named(self._rows[index])
        row.pop(self._options.id_field, None)
        row = {name: self._json(index, name, value) for name, value in row.items()}
        taken = {name: row.pop(name) for name in self._inputs}
        made = taken if isinstance(self._options.input_field, tuple) else taken[self._options.input_field]
        return Task(self._id(index + 1), made, metadata=row)

    def _json(self, index: int, name: str, value: Any) -> Any:
        """A value as JSON has it: a date is its text."""
        try:
            return load_json(dump_json(value))
        except ValueError:
            raise ConfigError(
                f"{self._where}, row {index + 1}: '{name}' is a {type(value).__name__}, which JSON does not have. "
                f"Make the column text or numbers, or leave it out."
            ) from None

    def _id(self, number: int) -> str:
        found = self._named(self._rows[number - 1]).get(self._options.id_field, number)
        if not isinstance(found, str | int) or found == "":
            raise ConfigError(
                f"{self._where}, row {number}: '{self._options.id_field}' must be a text or an integer, not {found!r}."
            )
        return str(found)

    def _named(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row with the names that the options give its columns."""
        ours = {theirs: name for name, theirs in self._options.columns.items()}
        return {ours.get(name, name): value for name, value in row.items()}


def csv_tasks(options: FileOptions, folder: Path, seed: int) -> TableTasks:
    """Tasks from a CSV file with a header; all values are texts."""
    path = _file(options, folder)
    try:
        rows = list(csv.DictReader(io.StringIO(read_utf8(path), newline=""), strict=True))
    except csv.Error as error:
        raise ConfigError(f"The tasks {path} cannot be read as CSV: {error}.") from error
    _check_rows(rows, path)
    return TableTasks(rows, options, str(path))


def parquet_tasks(options: FileOptions, folder: Path, seed: int) -> TableTasks:
    """Tasks from a Parquet file (needs `agl-core[export]`)."""
    import pyarrow as pa
    import pyarrow.parquet

    path = _file(options, folder)
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"The tasks {path} cannot be read as Parquet: {error}.") from error
    return TableTasks(rows, options, str(path))


def dataset_tasks(options: DatasetOptions, folder: Path, seed: int) -> TableTasks:
    """Tasks from a Hugging Face dataset, by its folder or its name on the hub (needs `agl-core[export]`)."""
    import datasets

    path, where = folder / Path(options.dataset).expanduser(), f"The dataset '{options.dataset}'"
    try:
        if (path / "state.json").is_file():
            found = datasets.load_from_disk(path)
        elif (path / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(path)[options.split]
        else:
            name = str(path) if path.exists() else options.dataset
            found = datasets.load_dataset(name, options.subset, split=options.split)
    except Exception as error:  # What is raised depends on the kind of dataset.
        raise ConfigError(
            f"{where}, split '{options.split}', cannot be loaded ({type(error).__name__}: {error}). It must be a "
            f"folder (looked for {path}) or a name on the Hugging Face hub."
        ) from error
    return TableTasks(found, options, where)


def _file(options: FileOptions, folder: Path) -> Path:
    path = folder / options.path.expanduser()
    if not path.is_file():
        raise ConfigError(
            f"The tasks {path} do not exist. Paths are relative to the configuration file, or to its `folder`."
        )
    return path


def _check_rows(rows: Iterable[Mapping[Any, Any]], path: Path) -> None:
    """ConfigError if a row has more or fewer values than the header."""
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise ConfigError(f"{path}, row {number}: has more or fewer values than the header has columns.")
