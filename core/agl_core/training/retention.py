"""The runs, their space on disk, and removing what a run no longer needs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import orjson

from agl_core.config.load import CONFIG_FILE
from agl_core.errors import StoreError
from agl_core.store.files import is_written
from agl_core.store.interface import Store
from agl_core.training.checkpoints import HEADLINE_SET, Checkpoints
from agl_core.training.run import METRICS_FILE
from agl_core.wire.keys import SERVER_FILE

_REWARD = "/reward/mean"

RunStatus: TypeAlias = Literal["running", "finished", "stopped", "capture"]
"""running: a process of this machine writes its store; finished: all steps made; stopped: can be resumed; capture: by
`agl run`."""


@runtime_checkable
class ShrinkingStore(Protocol):
    """A store that can be made smaller."""

    async def prune(self, up_to: int) -> int:
        """Remove texts and tokens from the calls of the steps up to `up_to`; returns the number of calls."""

    async def vacuum(self) -> None:
        """Free unused space."""


@dataclass(frozen=True)
class RunEntry:
    """One run, read from its folder."""

    folder: Path
    state: RunStatus
    steps: int
    """The number of steps made."""
    of_steps: int | None
    """The number of steps to make; None for a capture."""
    size: int
    """Bytes of all its files."""
    reward_before: float | None
    """The reward of the first evaluation, on the headline set."""
    reward_after: float | None
    """The reward of the last evaluation; None if there was only one."""


def list_runs(runs: Path) -> list[RunEntry]:
    """The runs below a folder, the oldest first."""
    files = sorted(runs.glob(f"*/{CONFIG_FILE}"), key=lambda file: (file.stat().st_mtime, file))
    return [_entry(file.parent) for file in files]


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def has_store(folder: Path) -> bool:
    """Whether a run was recorded in its own folder, and not by a server elsewhere."""
    return any((folder / name).exists() for name in ("store.sqlite", SERVER_FILE))


async def prune_calls(store: Store, folder: Path, keep_steps: int) -> tuple[int, int]:
    """Keep only the calls of the last steps complete; returns the number of pruned calls, and the step up to which.

    `store` is the run's, open for writing, so that no other process writes it. All or nothing.
    """
    last = max((rollout.step for rollout in await store.rollouts() if rollout.mode.trains), default=0)
    return await _shrinking(store, folder).prune(last - keep_steps), max(last - keep_steps, 0)


def prune_checkpoints(folder: Path, keep: int | None) -> list[Path]:
    """Keep the last so many checkpoints and the best one (None: as the run's `train.keep_checkpoints`).

    Each is removed at once. Returns the removed checkpoints.
    """
    if keep is None:
        keep = int(_toml(folder / CONFIG_FILE).get("train", {}).get("keep_checkpoints", 2))
    return Checkpoints(folder / "checkpoints", keep).prune()


async def vacuum(store: Store, folder: Path) -> None:
    """Free the unused space of a run's store; `store` is open for writing."""
    await _shrinking(store, folder).vacuum()


def _shrinking(store: Store, folder: Path) -> ShrinkingStore:
    if not isinstance(store, ShrinkingStore):
        raise StoreError(f"The store of {folder} is a {type(store).__name__}, which cannot be made smaller.")
    return store


def _entry(folder: Path) -> RunEntry:
    config, lines = _toml(folder / CONFIG_FILE), _lines(folder / METRICS_FILE)
    steps = max((int(line["step"]) for line in lines if line["kind"] == "train"), default=0)
    planned = None if "capture" in config else int(config.get("train", {}).get("steps", 0))
    rewards = [value for line in lines if line["kind"] == "eval" and (value := _headline(line)) is not None]
    state: RunStatus = "stopped"
    if is_written(folder / "store.sqlite"):
        state = "running"
    elif planned is None:
        state = "capture"
    elif planned and steps >= planned:
        state = "finished"
    return RunEntry(
        folder=folder,
        state=state,
        steps=steps,
        of_steps=planned,
        size=size_of(folder),
        reward_before=rewards[0] if rewards else None,
        reward_after=rewards[-1] if len(rewards) > 1 else None,
    )


def _headline(line: Mapping[str, Any]) -> float | None:
    """The reward of the set `eval`, else of the first one; in the first mode."""
    rewards = {key: float(value) for key, value in line.items() if key.endswith(_REWARD)}
    of_set = [value for key, value in rewards.items() if key.startswith(f"{HEADLINE_SET}/")]
    return next(iter(of_set or rewards.values()), None)


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, ValueError):
        return {}


def _lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file; the last one may be incomplete."""
    found = []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            read = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(read, dict) and {"step", "kind"} <= read.keys():
            found.append(read)
    return found
