"""The checkpoints of a run, complete or absent: the weights, and what the run has done so far."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from agl_core import private
from agl_core.errors import CheckpointError, ConfigError
from agl_server.health.verdict import HEADLINE_SET

_log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
_STATE, _PREFIX, _TOKENS = "state.json", "step-", "tokens.json"
VERSIONS_FILE = "versions.jsonl"
"""In a run's folder: one decision on its versions on each line. `kept` in the last line has the steps of those that are
served, or may be again, the stable one first."""


@dataclass
class RunState:
    """Progress of a run; saved with every checkpoint."""

    step: int = 0
    seconds: float = 0.0
    """Time spent, earlier restarts included."""
    groups_begun: int = 0
    groups_unfinished: list[int] = field(default_factory=list)
    """The positions, from 0, of begun groups that no step trained on: they are begun again."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """One entry per evaluation: step, set, mode, reward, rollouts, calls, seconds."""
    peak_rss_bytes: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """By kind, those that cost something; of the whole run, also of steps that were superseded."""
    resets: list[list[int]] = field(default_factory=list)
    """After which step the weights went back to those of which earlier step: pairs, the earliest first."""
    config: dict[str, Any] = field(default_factory=dict)
    """The configuration with which the last step was made."""

    @property
    def rewards(self) -> dict[int, float]:
        """By step, the evaluation of the set `eval`, or else the first set, in its first mode; for replies −loss."""
        sets = [entry["set"] for entry in self.evaluations]
        headline = HEADLINE_SET if HEADLINE_SET in sets else next(iter(sets), "")
        entries = [entry for entry in self.evaluations if entry["set"] == headline]
        of_mode = [entry for entry in entries if entry["mode"] == entries[0]["mode"]]
        return {entry["step"]: float(entry["reward"] if "reward" in entry else -entry["loss"]) for entry in of_mode}

    def plateau(self, patience: int) -> str:
        """In which way the rewards no longer rise; empty as long as they may."""
        rewards, best, waited = self.rewards, -1, 0
        for step, reward in rewards.items():
            is_best = best < 0 or reward > rewards[best]
            best, waited = (step, 0) if is_best else (best, waited + 1)
        if not patience or waited < patience:
            return ""
        return f"none of {waited} evaluations was better than that of step {best} ({rewards[best]:.3g})"


def read_state(checkpoint: Path) -> RunState:
    """The progress of the run when this checkpoint was written."""
    try:
        return RunState(**orjson.loads((checkpoint / _STATE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / _STATE} cannot be read: {error}. {_instead_of(checkpoint)}") from error


class Checkpoints:
    """The checkpoints of one run, in `folder/step-N`, and beside the folder links to the latest weights.

    The last `keep` are kept, the best one, and those in use. The link is `model`, or for several `model-POLICY`.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self._keep = folder, keep

    def path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:06d}"

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return _complete_in(self.folder)

    def latest(self) -> Path:
        checkpoints = self.all()
        if not checkpoints:
            raise CheckpointError(
                f"{self.folder} holds no checkpoint, so there is nothing to resume from. Start a new run."
            )
        return checkpoints[-1]

    def meant_by(self, name: str) -> Path | None:
        """The checkpoint of a step, `latest`, `best` or `stable`; None: step 0. CheckpointError lists all if none."""
        path = None
        if name == "latest":
            path = self.latest()
        elif name == "best":
            path = self.best()
        elif name == "stable" or name.isdecimal():
            step = next(iter(self.in_use()), None) if name == "stable" else int(name)
            if step == 0:
                return None
            path = None if step is None else self.path(step)
        by_name, wanted = {kept.name: kept for kept in self.all()}, name if path is None else path.name
        if wanted not in by_name:
            has = ", ".join(by_name) or "none"
            raise CheckpointError(f"{self.folder} keeps no checkpoint {wanted}. It has: {has}.")
        return by_name[wanted]

    def begin(self, step: int) -> Path:
        """An empty folder to write into; it becomes the checkpoint by `commit`."""
        part = _part(self.path(step))
        shutil.rmtree(part, ignore_errors=True)
        with _writing(part):
            part.mkdir(parents=True)
        return part

    def commit(self, part: Path, state: RunState) -> Path:
        """Make the files the checkpoint of `state.step`, synced to the disk before those that are too old go."""
        target = self.path(state.step)
        with _writing(target):
            private.write(part / _STATE, orjson.dumps(asdict(state), option=orjson.OPT_INDENT_2))
            for path in (*part.rglob("*"), part):
                _sync(path)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(part, target)
            _sync(self.folder)
        _link(target)
        self.prune()
        return target

    def prune(self) -> list[Path]:
        """Remove the checkpoints that are not kept; returns them."""
        kept = {self.best(), *map(self.path, self.in_use())}
        return _remove(path for path in self.all()[: -self._keep] if path not in kept)

    def forget_after(self, step: int) -> list[Path]:
        """Remove the checkpoints of later steps, which a run that goes on from this one supersedes; returns them."""
        return _remove(path for path in self.all() if path.name > self.path(step).name)

    def best(self) -> Path | None:
        """The one whose evaluation had the highest reward, the latest of equals; None if none was evaluated."""
        rewards = {path: reward for path in self.all() if (reward := _evaluated(path)) is not None}
        return max(reversed(rewards), key=rewards.__getitem__, default=None)

    def in_use(self) -> list[int]:
        """The steps of the versions that are needed, the stable one first. CheckpointError if they are not known."""
        file = self.folder.parent / VERSIONS_FILE
        try:
            content = file.read_bytes() if file.exists() else b""
            # A last line that a kill left incomplete was never decided.
            decisions = content[: content.rfind(b"\n") + 1].splitlines()
            return list(orjson.loads(decisions[-1])["kept"]) if decisions else []
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"{file} does not say which versions are in use ({error!r}). Restore the file from a backup."
            ) from error

    def read_tokens(self) -> dict[str, int]:
        """The latest `RunState.tokens`, which are older in checkpoints; none if the file is absent or damaged."""
        with suppress(FileNotFoundError, ValueError):
            return dict(orjson.loads((self.folder.parent / _TOKENS).read_bytes()))
        return {}

    def write_tokens(self, tokens: Mapping[str, int]) -> None:
        private.replace(self.folder.parent / _TOKENS, orjson.dumps(tokens))


def model_links(checkpoint: Path) -> dict[Path, Path]:
    """The links in a run's folder to the weights of a checkpoint, and where they lead (`Engine.save`)."""
    models = sorted(checkpoint.glob("*/model"))
    run = checkpoint.parent.parent
    return {run / ("model" if len(models) == 1 else f"model-{model.parent.name}"): model for model in models}


def _link(checkpoint: Path) -> None:
    """Point the links to the weights of this checkpoint; each link always points to complete weights."""
    for link, weights in model_links(checkpoint).items():
        part = link.with_name(f".{link.name}.part")
        try:
            part.unlink(missing_ok=True)
            part.symlink_to(os.path.relpath(weights, link.parent))
            os.replace(part, link)
        except OSError as error:
            _log.warning("%s cannot be made a link to the weights in %s: %s", link, weights, error)


def _remove(checkpoints: Iterable[Path]) -> list[Path]:
    """Each checkpoint is complete or absent, even if this is interrupted."""
    removed = list(checkpoints)
    for checkpoint in removed:
        part = _part(checkpoint)
        shutil.rmtree(part, ignore_errors=True)
        os.replace(checkpoint, part)
        shutil.rmtree(part, ignore_errors=True)
    return removed


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} cannot be written ({error}). Check the permissions and the disk, and resume the "
            f"run from the checkpoint before."
        ) from error


def _part(checkpoint: Path) -> Path:
    """The folder of a checkpoint while it is not complete."""
    return checkpoint.with_name(f".{checkpoint.name}.part")


def _complete_in(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"{_PREFIX}*/{_STATE}"))


def _instead_of(checkpoint: Path) -> str:
    """Advice for a checkpoint that cannot be used."""
    earlier = [path for path in _complete_in(checkpoint.parent) if path.name < checkpoint.name]
    if not earlier:
        return "Restore the checkpoint from a copy; there is no earlier one, so otherwise start a new run."
    return f"Restore the checkpoint from a copy, or go on from an earlier one: agl train --resume {earlier[-1]}."


def _evaluated(checkpoint: Path) -> float | None:
    """The checkpoint's reward; None if it was not evaluated at its step, or is damaged."""
    try:
        state = read_state(checkpoint)
        return state.rewards.get(state.step)
    except (CheckpointError, LookupError, TypeError, ValueError):
        return None


def _sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_SETTLED: Mapping[str, str] = {
    r"name|runs": "a run keeps its folder (which you may move)",
    r"seed": "the order of the tasks and all sampling follow from it",
    r"engine\.name": "an engine reads its own checkpoints only",
    r"policies\.[^.]+": "the checkpoint has the policies that it was written with",
    r"policies\.[^.]+\.model\b.*": "the checkpoint has these weights, in this form",
}
"""Which keys cannot change when a run is resumed, and why."""


def check_changes(before: Mapping[str, Any], after: Mapping[str, Any], folder: Path, checkpoint: Path) -> list[str]:
    """The differences between two configurations, in words. ConfigError if a change does not fit the run's checkpoint.

    `before` is the configuration that the checkpoint was written with, `folder` where paths start now.
    """
    changes, refused = [], []
    for key, was, is_now in differences(before, after):
        change = f"{key}: {_brief(was)} → {_brief(is_now)}"
        changes.append(change)
        why = next((why for keys, why in _SETTLED.items() if re.fullmatch(keys, key)), None)
        if why is not None and not (key.endswith(".model.path") and _has_moved(was, is_now, before, folder)):
            refused.append(f"\n  {change}, but {why}")
    if refused:
        raise ConfigError(
            f"The run cannot go on from {checkpoint} with another configuration:{''.join(refused)}\nLeave that as it "
            f"was, or start a new run from the weights in {checkpoint}."
        )
    return changes


def _has_moved(was: str, is_now: str, before: Mapping[str, Any], folder: Path) -> bool:
    """True if the initial weights are a folder that was moved."""
    old, new = Path(before.get("folder") or folder, Path(was).expanduser()), Path(folder, Path(is_now).expanduser())
    return new.is_dir() and (not old.is_dir() or old.samefile(new))


def differences(before: Mapping[str, Any], after: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys with both values (None: it is absent), apart from the place of the run's project."""
    for name in dict.fromkeys((*before, *after)):
        was, is_now, key = before.get(name), after.get(name), f"{above}{name}"
        if isinstance(was, Mapping) and isinstance(is_now, Mapping):
            yield from differences(was, is_now, f"{key}.")
        elif was != is_now and key != "folder":
            yield key, was, is_now


def _brief(value: Any) -> str:
    text = "not set" if value is None else orjson.dumps(value).decode()
    return text if len(text) <= 200 else f"{text[:199]}…"
