"""Tasks from a file: the task source "jsonl"."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from agl_core.errors import ConfigError, nearest
from agl_core.types import Task


class JsonlOptions(BaseModel):
    """The file, and the keys of its objects."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(
        description="A file with one JSON object per line, relative to the configuration file. What an object has "
        "beside the task's input and id is the task's metadata, which rewards see and the agent does not."
    )
    input_field: str = Field("input", min_length=1, description="The key of the task's input.")
    id_field: str = Field("id", min_length=1, description="The key of the task's id; without it, the line number.")


class JsonlTasks:
    """Tasks from a file with one JSON object per line; keys beside input and id are the task's metadata.

    The agent is called with the object's input, and rewards see the metadata. Blank lines are skipped.

        {"id": "a1", "question": "2 + 3?", "result": "5"}     # with input_field = "question"
    """

    def __init__(self, options: JsonlOptions, folder: Path) -> None:
        """Read the whole file, so that a bad line is an error before anything runs. ConfigError names the line."""
        path = folder / options.path.expanduser()
        self._tasks = list(_read(path, options))
        if not self._tasks:
            raise ConfigError(f"{path} has no tasks: it must have one JSON object per line.")

    @property
    def size(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> Task:
        """The task at this index, 0 … size-1, in the order of the file."""
        return self._tasks[index]


def _read(path: Path, options: JsonlOptions) -> Iterator[Task]:
    line_of: dict[str, int] = {}
    for number, line in enumerate(read_utf8(path).split("\n"), start=1):
        if not line.strip():
            continue
        task = _parse(line, number, f"{path}:{number}", options)
        if task.id in line_of:
            raise ConfigError(
                f"{path}:{number}: the id '{task.id}' is that of line {line_of[task.id]} too. "
                f"Ids must be unique; without '{options.id_field}' the line number is taken."
            )
        line_of[task.id] = number
        yield task


def read_utf8(path: Path) -> str:
    """The text of a file of tasks. ConfigError names what is wrong with it, and where."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"The tasks {path} do not exist. Paths are relative to the configuration file, or to its `folder`."
        ) from None
    except OSError as error:
        raise ConfigError(f"The tasks {path} cannot be read: {error}.") from error
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        *before, line = data[: error.start].split(b"\n")
        raise ConfigError(
            f"{path}:{len(before) + 1}: byte {len(line) + 1} of the line is "
            f"0x{data[error.start]:02x}, which is not UTF-8. Save the file as UTF-8, for instance: "
            f"iconv -f WINDOWS-1252 -t UTF-8 {path.name} > utf8-{path.name}"
        ) from None


def _parse(line: str, number: int, where: str, options: JsonlOptions) -> Task:
    try:
        found: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where}: not a JSON object ({error}). Each line must be one.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: must be a JSON object, not {type(found).__name__}.")
    if options.input_field not in found:
        raise ConfigError(
            f"{where}: has no '{options.input_field}' for the task's input. {nearest(options.input_field, found)} "
            f"Set input_field to the right one."
        )
    task_id = found.pop(options.id_field, number)
    if not isinstance(task_id, str | int):
        raise ConfigError(f"{where}: '{options.id_field}' must be a text or an integer, not {task_id!r}.")
    return Task(id=str(task_id), input=found.pop(options.input_field), metadata=found)
