"""The checkpoints of a run, which are complete or absent: writing, keeping, finding and removing them."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from agl_core import private
from agl_core.errors import CheckpointError
from agl_core.training.checkpoints.digests import seal, sync
from agl_core.training.checkpoints.state import PREFIX, STATE_FILE, RunState, complete_in, headline, read_state

_log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Their folder in a run's."""
_STABLE = "stable.json"
"""In a run's folder: of each policy the step of its stable version, and of others that are needed."""


class Checkpoints:
    """The checkpoints of one run, in `folder/step-N`, and beside the folder links to the latest weights.

    The last `keep` are kept, the best one, and those marked as stable. The link is `model`, or
    `model-POLICY` for each of several policies; transformers loads it. It is relative, so a run can be moved.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self._keep = folder, keep

    def path(self, step: int) -> Path:
        return self.folder / f"{PREFIX}{step:06d}"

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
            private.write(part / STATE_FILE, orjson.dumps(asdict(state), option=orjson.OPT_INDENT_2))
            seal(part)
            _give_mode_of(self.folder.parent, part)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(part, target)
            sync(self.folder)
        self._link(target)
        self.prune()
        return target

    def prune(self) -> list[Path]:
        """Remove the checkpoints that are not kept; returns them."""
        kept = {self.best()} | {self.path(step) for steps in self._marked().values() for step in steps}
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
        return complete_in(self.folder)

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

    def meant_by(self, name: str) -> Path | None:
        """The checkpoint of a step or of `latest`, `best` or `stable`; None: what training started from (step 0)."""
        if name == "latest":
            return self.latest()
        step = (
            min(self.stable().values(), default=None) if name == "stable" else int(name) if name.isdecimal() else None
        )
        found = self.best() if name == "best" else None if step is None else self.path(step)
        if step == 0:
            return None
        return self.named(name if found is None else found.name)

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


def _part(checkpoint: Path) -> Path:
    """The folder of a checkpoint while it is not complete."""
    return checkpoint.with_name(f".{checkpoint.name}.part")


def _evaluated(checkpoint: Path) -> float | None:
    """The checkpoint's reward on the headline set; None if it was not evaluated at its step, or is damaged."""
    try:
        state = read_state(checkpoint)
        return next((float(e["reward"]) for e in headline(state.evaluations) if e["step"] == state.step), None)
    except (CheckpointError, LookupError, TypeError, ValueError):
        return None
