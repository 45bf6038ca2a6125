"""The runs in a folder: finding one, opening its store, listing them, and making them smaller."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import tomli_w

from agl_core import private
from agl_core.config.load import CONFIG_FILE, STORED, load
from agl_core.config.sections import FOLDER_NAME
from agl_core.errors import ConfigError, StoreError
from agl_core.plugins import Plugins
from agl_core.store import Store
from agl_core.types import Mode, RolloutState
from agl_server.health.verdict import METRICS_FILE, MetricsLine, RunVerdict, read_metrics, stopped_early, verdict_of
from agl_server.store.connections import is_written, log_of
from agl_server.store.sqlite import SqliteStore
from agl_server.training.checkpoints import CHECKPOINTS, Checkpoints
from agl_server.training.metrics import SUMMARY_FILE

RUNS = Path("runs")
"""The folder in which commands look for runs."""
_STORE = "store.sqlite"

RunStatus: TypeAlias = Literal["running", "finished", "finished early", "stopped", "failed", "capture"]
"""running: a process of this machine writes its store; finished: all steps made, though `agl eval` may write to it;
finished early: by `eval.patience` or `train.stop`; stopped: can be resumed; failed: it died, by an error or a kill, and
can be resumed, or no rollout of it finished; capture: by `agl run`."""


@dataclass(frozen=True, slots=True)
class RunEntry:
    folder: Path
    state: RunStatus
    steps: int
    of_steps: int | None
    """The planned steps; None for a capture."""
    size: int
    reward_before: float | None
    """The reward of the first evaluation, on the headline set."""
    reward_after: float | None
    """The reward of the last evaluation; None if there was only one."""
    verdict: RunVerdict | None


@dataclass(frozen=True, slots=True)
class PruneSummary:
    folder: Path
    rollouts: int
    up_to_step: int
    checkpoints: Sequence[Path]
    before: int
    """Bytes of all its files, before and after."""
    after: int


def find_run(folder: Path | None) -> Path:
    """A run's folder, named as such or by its name below ./runs; None: the newest one. ConfigError if there is none."""
    folders = run_folders(RUNS)
    if folder is None:
        if not folders:
            raise ConfigError("There are no runs below ./runs. Name a run's folder, or train first: agl train CONFIG.")
        return folders[-1]
    for candidate in (folder, RUNS / folder):
        if (candidate / CONFIG_FILE).is_file():
            return candidate
    names = ", ".join(sorted(known.name for known in folders))
    runs = f"Runs here: {names}." if names else "There are no runs below ./runs."
    why = f" (it has no {CONFIG_FILE})" if folder.exists() else ", nor is there such a file"
    raise ConfigError(f"{folder} is not a run's folder{why}. {runs}")


def run_folders(runs: Path) -> list[Path]:
    """The runs below a folder, the oldest first."""
    files = sorted(runs.glob(f"*/{CONFIG_FILE}"), key=lambda file: (file.stat().st_mtime, file))
    return [file.parent for file in files]


def open_store(folder: Path, *, read_only: bool = True) -> Store:
    """The store of a run or of a capture, to be opened with `async with`."""
    chosen = read_settings(folder).get("store", {"name": "sqlite"})
    if chosen.get("name") == "sqlite" and not chosen.get("sqlite"):
        return SqliteStore(folder / _STORE, read_only=read_only)  # Finding its plugin would take a while.
    # The run may be somebody else's: none of its plugin files is imported.
    loaded = load(folder / CONFIG_FILE, needs=STORED, plugins=Plugins.load())
    return cast(Store, loaded.store.build(folder, read_only))


def has_writer(folder: Path) -> bool:
    """True while a process of this machine writes the run's store."""
    return is_written(folder / _STORE)


def state_mark(folder: Path) -> str:
    """Sizes and times of what a run writes: another text once something was recorded."""
    marks = []
    for file in (folder / METRICS_FILE, folder / _STORE, log_of(folder / _STORE)):
        with suppress(OSError):
            stat = file.stat()
            marks.append(f"{file.name} {stat.st_size} {stat.st_mtime_ns}")
    return "/".join(marks)


async def read_start(folder: Path) -> float | None:
    """The time at which the run was first started; None if nothing was recorded yet."""
    async with open_store(folder) as store:
        return min((run.started for run in await store.runs()), default=None)


def is_capture(folder: Path) -> bool:
    """True if `agl run` recorded here, in front of an upstream."""
    return "capture" in read_settings(folder)


def is_run(folder: Path) -> bool:
    """True for a run's folder; a user's own may have a `config.toml` too."""
    return any((folder / name).exists() for name in (_STORE, METRICS_FILE, CHECKPOINTS))


PREFERENCES = "preferences"
"""The key of a capture's table that says whether it has pairs of which one conversation is preferred."""


def write_capture(folder: Path, source: Mapping[str, Any]) -> None:
    """Make the folder a run that was recorded without training; `source` says where it is from."""
    private.write(folder / CONFIG_FILE, tomli_w.dumps({"config_version": 1, "capture": dict(source)}))


def check_name(name: str) -> str:
    """The name for a run, if a folder can be called so; else ConfigError."""
    if not FOLDER_NAME.fullmatch(name):
        raise ConfigError(f"--name '{name}' cannot be a folder's name: use letters, digits, '.', '_' and '-'.")
    return name


def policy_names(folder: Path) -> list[str]:
    """The policies that a run trains; none of a capture."""
    return list(read_settings(folder).get("policies", {}))


def read_settings(folder: Path) -> dict[str, Any]:
    """The run's configuration as its file has it; nothing if it cannot be read."""
    try:
        return tomllib.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return {}


def read_entry(folder: Path, metrics: Sequence[MetricsLine] | None = None) -> RunEntry:
    """A run as a list shows it; `metrics` are those in its folder, if they have been read."""
    settings, lines = read_settings(folder), read_metrics(folder) if metrics is None else metrics
    steps = max((line.step for line in lines if line.kind == "train"), default=0)
    planned = None if "capture" in settings else int(settings.get("train", {}).get("steps", 0))
    rewards = [line.headline for line in lines if line.kind == "eval" and line.headline is not None]
    early = stopped_early(lines)
    all_made = bool(early) or (planned is not None and 0 < planned <= steps)
    # A training process removes the run's summary at the start, and writes it at the end, unless it dies.
    has_ended = (folder / SUMMARY_FILE).exists()
    has_died = not has_ended and (folder / CHECKPOINTS).exists()
    verdict = None if planned is None else verdict_of(lines)
    state: RunStatus = "stopped"
    if has_writer(folder) and not (all_made and has_ended):
        state = "running"
    elif planned is None:
        state = "capture"
    elif has_died or (verdict is not None and verdict.failed):
        state = "failed"
    elif all_made:
        state = "finished early" if early else "finished"
    before, after = rewards[0] if rewards else None, rewards[-1] if len(rewards) > 1 else None
    return RunEntry(folder, state, steps, planned, _size(folder), before, after, verdict)


async def prune(folder: Path, keep_steps: int, keep_checkpoints: int | None) -> PruneSummary:
    """Keep only the rollouts of the last steps, the last checkpoints, and the best one; free unused space.

    Rollouts that were opened from outside stay. StoreError if another process writes the store.
    """
    before = _size(folder)
    async with open_store(folder, read_only=False) as store:
        if not isinstance(store, SqliteStore):
            raise StoreError(f"The store of {folder} is a {type(store).__name__}, which cannot be made smaller.")
        rollouts = await store.rollouts()
        up_to = max((rollout.step for rollout in rollouts if rollout.mode.trains), default=0) - keep_steps
        done = [r for r in rollouts if r.state is RolloutState.DONE and r.mode is not Mode.USE]
        removed = await store.erase([rollout.id for rollout in done if rollout.step <= up_to])
        await store.vacuum()
    if keep_checkpoints is None:
        keep_checkpoints = int(read_settings(folder).get("train", {}).get("keep_checkpoints", 2))
    checkpoints = Checkpoints(folder / CHECKPOINTS, keep_checkpoints).prune()
    return PruneSummary(folder, removed, max(up_to, 0), checkpoints, before, _size(folder))


def remove(folder: Path) -> None:
    """Remove a run with all its files. ConfigError if it is none; StoreError if a process writes it."""
    if "config_version" not in read_settings(folder):
        raise ConfigError(f"{folder} is not removed: its {CONFIG_FILE} is not that of a run.")
    if has_writer(folder):
        raise StoreError(f"{folder} is not removed: a process trains, serves or evaluates it. End that first.")
    shutil.rmtree(folder)


def _size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
