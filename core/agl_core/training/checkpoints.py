"""Checkpoints, which are complete or absent: the state of a run besides its weights, and what resuming may change."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from agl_core import private
from agl_core.errors import CheckpointError, ConfigError
from agl_core.types import Episode

_log = logging.getLogger(__name__)

HEADLINE_SET = "eval"
CHECKPOINTS = "checkpoints"
"""Their folder in a run's."""
_STATE = "state.json"
_PREFIX = "step-"
_STABLE = "stable.json"
"""In a run's folder: of each policy the step of its stable version, and of others that are needed."""
_SUMS = "SHA256SUMS"
"""One line for each file of a checkpoint, which `sha256sum --check` reads too."""


@dataclass
class RunState:
    """What a run has done so far; saved with every checkpoint."""

    step: int = 0
    seconds: float = 0.0
    """Time spent, earlier restarts included."""
    groups_begun: int = 0
    """Groups of training rollouts."""
    groups_unfinished: list[int] = field(default_factory=list)
    """The positions, from 0, of begun groups that no step trained on: they are begun again."""
    llm_calls: int = 0
    passed_through: int = 0
    """Requests that were passed on and not recorded."""
    kept: int = 0
    """Transitions trained on."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Transitions dropped, by reason."""
    endings: dict[str, int] = field(default_factory=dict)
    """The number of training rollouts by ending."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """One entry per evaluation: step, set, mode, reward, rollouts, seconds."""
    train_rewards: list[float] = field(default_factory=list)
    """The mean reward of each step."""
    peak_rss_bytes: int = 0
    resets: list[list[int]] = field(default_factory=list)
    """After which step the weights went back to those of which earlier step: pairs, the earliest first."""
    config: dict[str, Any] = field(default_factory=dict)
    """The configuration with which the last step was made."""

    def count_dropped(self, reasons: Mapping[str, int]) -> None:
        for reason, count in reasons.items():
            name = str(reason)  # JSON keys cannot be members of an enum.
            self.dropped[name] = self.dropped.get(name, 0) + count

    def count_endings(self, episodes: Iterable[Episode]) -> None:
        for episode in episodes:
            self.endings[episode.ending.value] = self.endings.get(episode.ending.value, 0) + 1


class Checkpoints:
    """The checkpoints of one run, in `folder/step-N`, and beside the folder links to the latest weights.

    The last `keep` are kept, the best one if `keep_best`, and those marked as stable. The link is `model`, or
    `model-POLICY` for each of several policies; transformers loads it. It is relative, so a run can be moved.
    """

    def __init__(self, folder: Path, keep: int, *, keep_best: bool = True) -> None:
        self.folder, self._keep, self._keep_best = folder, keep, keep_best

    def path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:06d}"

    def begin(self, step: int) -> Path:
        """An empty folder to write into; it becomes the checkpoint by `commit`."""
        part = _part(self.path(step))
        shutil.rmtree(part, ignore_errors=True)
        with self._written(part):
            part.mkdir(parents=True)
        return part

    def commit(self, part: Path, state: RunState) -> Path:
        """Make the written files the checkpoint of `state.step`, and remove checkpoints that are too old.

        All of it is on the disk, not only in caches, before an older checkpoint is removed. This reads every file once.
        """
        target = self.path(state.step)
        with self._written(target):
            private.write(part / _STATE, orjson.dumps(asdict(state), option=orjson.OPT_INDENT_2))
            _seal(part)
            _give_mode_of(self.folder.parent, part)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(part, target)
            _sync(self.folder)
        self._link(target)
        self.prune()
        return target

    def prune(self) -> list[Path]:
        """Remove the checkpoints that are not kept; returns them."""
        kept = {self.best() if self._keep_best else None}
        kept |= {self.path(step) for steps in self._marked().values() for step in steps}
        old = [path for path in self.all()[: -self._keep] if path not in kept]
        for path in old:
            self._remove(path)
        return old

    def best(self) -> Path | None:
        """The one whose evaluation had the highest reward, the latest of equals; None if none was evaluated."""
        rewards = {path: reward for path in self.all() if (reward := _evaluated(path)) is not None}
        return max(reversed(rewards), key=rewards.__getitem__, default=None)

    def stable(self) -> dict[str, int]:
        """The step of each policy's stable version, of those that have one. CheckpointError if that cannot be read."""
        return {policy: steps[0] for policy, steps in self._marked().items()}

    def mark_stable(self, policy: str, step: int, needed: Sequence[int] = ()) -> None:
        """Make the version of this step the policy's stable one; it and those that are needed are kept from now on."""
        marks, wanted = self._marked(), list(dict.fromkeys((step, *needed)))
        if marks.get(policy) != wanted:
            private.replace(self.folder.parent / _STABLE, orjson.dumps({**marks, policy: wanted}))

    def _marked(self) -> dict[str, list[int]]:
        """Of each policy the steps that are kept, the stable one first."""
        file = self.folder.parent / _STABLE
        try:
            marks = {policy: step if isinstance(step, list) else [step] for policy, step in _read_marks(file).items()}
            if not all(steps and all(type(step) is int for step in steps) for steps in marks.values()):
                raise ValueError("it is no object of steps")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}. Remove it, and mark the version again.") from error
        return marks

    def _link(self, checkpoint: Path) -> None:
        """Point the links to the weights of this checkpoint; each link always points to complete weights."""
        for link, weights in model_links(checkpoint).items():
            part = link.with_name(f".{link.name}.part")
            try:
                part.unlink(missing_ok=True)
                part.symlink_to(os.path.relpath(weights, link.parent))
                os.replace(part, link)
            except OSError as error:
                _log.warning("%s cannot be made a link to the weights in %s: %s", link, weights, error)

    def _remove(self, checkpoint: Path) -> None:
        """The checkpoint is complete or absent, even if this is interrupted."""
        part = _part(checkpoint)
        shutil.rmtree(part, ignore_errors=True)
        os.replace(checkpoint, part)
        shutil.rmtree(part, ignore_errors=True)

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path.parent for path in self.folder.glob(f"{_PREFIX}*/{_STATE}"))

    def named(self, name: str) -> Path:
        """The checkpoint of this name; otherwise a CheckpointError lists those that exist."""
        found = {path.name: path for path in self.all()}
        if name not in found:
            kept = ", ".join(found) or "none"
            raise CheckpointError(f"{self.folder} keeps no checkpoint {name}. It has: {kept}.")
        return found[name]

    def forget_after(self, step: int) -> list[Path]:
        """Remove the checkpoints of later steps, which a run that goes on from this one supersedes; returns them."""
        later = [path for path in self.all() if path.name > self.path(step).name]
        for path in later:
            self._remove(path)
        return later

    @contextmanager
    def _written(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint {path} cannot be written ({error}). Check the permissions and the disk, and resume "
                f"the run from the checkpoint before."
            ) from error

    def latest(self) -> Path:
        found = self.all()
        if not found:
            raise CheckpointError(
                f"{self.folder} holds no checkpoint, so there is nothing to resume from. Start a new run."
            )
        return found[-1]


def _read_marks(file: Path) -> dict[str, Any]:
    marks = orjson.loads(file.read_bytes())
    if not isinstance(marks, dict):
        raise ValueError("it is no object of steps")
    return marks


def _evaluated(checkpoint: Path) -> float | None:
    """The checkpoint's reward on the headline set; None if it was not evaluated at its step, or is damaged."""
    try:
        state = read_state(checkpoint)
        return next((float(e["reward"]) for e in headline(state.evaluations) if e["step"] == state.step), None)
    except (CheckpointError, LookupError, TypeError, ValueError):
        return None


def headline(evaluations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The evaluations of the set `eval`, or else of the first set, in the first mode; oldest first."""
    sets = [e["set"] for e in evaluations]
    chosen = [e for e in evaluations if e["set"] == (HEADLINE_SET if HEADLINE_SET in sets else sets[0])]
    return [e for e in chosen if e["mode"] == chosen[0]["mode"]]


def model_links(checkpoint: Path) -> dict[Path, Path]:
    """The links in a run's folder to the weights of a checkpoint, and where they lead (`Engine.save`)."""
    found = sorted(checkpoint.glob("*/model"))
    run = checkpoint.parent.parent
    return {run / ("model" if len(found) == 1 else f"model-{each.parent.name}"): each for each in found}


def _give_mode_of(run: Path, part: Path) -> None:
    """Give a checkpoint the permissions of its run: some libraries write files for their owner alone."""
    mode = run.stat().st_mode & 0o777
    for path in (part, *part.rglob("*")):
        wanted = mode if path.is_dir() else mode & 0o666
        if not path.is_symlink() and path.stat().st_mode & 0o777 != wanted:
            path.chmod(wanted)


def read_state(checkpoint: Path) -> RunState:
    """What the run had done when this checkpoint was written."""
    try:
        return RunState(**orjson.loads((checkpoint / _STATE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / _STATE} cannot be read: {error}. {_instead_of(checkpoint)}") from error


def verify(checkpoint: Path) -> bool:
    """CheckpointError if a file of a checkpoint differs from what was written; False if it has no digests.

    This reads every file once.
    """
    sums = checkpoint / _SUMS
    if not sums.exists():
        return False
    try:
        lines = sums.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{sums} cannot be read: {error}. {_instead_of(checkpoint)}") from error
    expected = {checkpoint / name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    with ThreadPoolExecutor() as pool:
        for (file, digest), found in zip(expected.items(), pool.map(_digest_if_readable, expected), strict=True):
            if found != digest:
                raise CheckpointError(
                    f"{file} is damaged: its SHA-256 was {digest} when the checkpoint was written, and is {found} now. "
                    f"{_instead_of(checkpoint)}"
                )
    return True


def _part(checkpoint: Path) -> Path:
    """The folder of a checkpoint while it is not complete."""
    return checkpoint.with_name(f".{checkpoint.name}.part")


def _instead_of(checkpoint: Path) -> str:
    """What to do if this checkpoint cannot be used."""
    earlier = [each for each in Checkpoints(checkpoint.parent, 1).all() if each.name < checkpoint.name]
    if not earlier:
        return "Restore the checkpoint from a copy; there is no earlier one, so otherwise start a new run."
    return f"Restore the checkpoint from a copy, or go on from an earlier one: agl train --resume {earlier[-1]}."


def _seal(folder: Path) -> None:
    """Sync everything below a folder to the disk, and write a digest of each file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_digest, files))
        sums = folder / _SUMS
        lines = (
            f"{digest}  {file.relative_to(folder).as_posix()}\n" for digest, file in zip(digests, files, strict=True)
        )
        sums.write_text("".join(lines), encoding="utf-8")
        folders = (path for path in folder.rglob("*") if path.is_dir())
        list(pool.map(_sync, (*files, sums, *folders, folder)))


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest_if_readable(file: Path) -> str:
    try:
        return _digest(file)
    except OSError as error:
        return f"unknown ({error.strerror})"


def _sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


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
