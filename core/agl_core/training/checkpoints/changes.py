"""What the configuration may change when a run is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agl_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value changed; None: the key is absent."""

    key: tuple[str, ...]
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{'.'.join(self.key)}: {_brief(self.before)} → {_brief(self.after)}"


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """The differences between two configurations, by dotted key, apart from the place of the run's project.

    >>> [str(each) for each in changes({"seed": 1, "train": {"steps": 4}}, {"seed": 1, "train": {"steps": 9}})]
    ['train.steps: 4 → 9']
    """
    return [each for each in _changes(before, after) if each.key != ("folder",)]


def check_changes(found: list[Change], before: Mapping[str, Any], folder: Path, checkpoint: Path) -> None:
    """ConfigError if one of these changes does not fit the run's checkpoint.

    `before` is the configuration that the checkpoint was written with, `folder` where paths start now.
    """
    refused = [
        f"{each}, but {why}"
        for each in found
        if (why := _why_settled(each.key)) is not None and not _has_moved(each, before, folder)
    ]
    if refused:
        raise ConfigError(
            "\n  ".join([f"The run cannot go on from {checkpoint} with another configuration:", *refused])
            + f"\nLeave that as it was, or start a new run from the weights in {checkpoint}."
        )


def _why_settled(key: tuple[str, ...]) -> str | None:
    """Why a key cannot change when a run is resumed; None: it can."""
    match key:
        case ("name" | "runs",):
            return "a run keeps its folder (which you may move)"
        case ("seed",):
            return "the order of the tasks and all sampling follow from it"
        case ("engine", "name"):
            return "an engine reads its own checkpoints only"
        case ("policies", _):
            return "the checkpoint has the policies that it was written with"
        case ("policies", _, "model", *_):
            return "the checkpoint has these weights, in this form"
    return None


def _has_moved(change: Change, before: Mapping[str, Any], folder: Path) -> bool:
    """Whether the initial weights are a folder that was moved."""
    if change.key[2:] != ("model", "path"):
        return False
    was = Path(before.get("folder") or folder, Path(change.before).expanduser())
    is_now = Path(folder, Path(change.after).expanduser())
    return is_now.is_dir() and (not was.is_dir() or was.samefile(is_now))


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[Change]:
    for name in dict.fromkeys((*before, *after)):
        was, is_now, key = before.get(name), after.get(name), (*above, name)
        if isinstance(was, Mapping) and isinstance(is_now, Mapping):
            yield from _changes(was, is_now, key)
        elif was != is_now:
            yield Change(key, was, is_now)


def _brief(value: Any) -> str:
    text = "not set" if value is None else orjson.dumps(value).decode()
    return text if len(text) <= 200 else f"{text[:199]}…"
