"""Versions of policies, by name: `calc@40`, `calc@latest`, `calc@best`, `calc@stable`.

The first part is the run's folder: a path, or a name below ./runs. In a run with several policies the policy's name
follows after a colon: `debate:solver@40`. Step 0 is what training started from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agl_core.config import CONFIG_FILE
from agl_core.errors import CheckpointError, ConfigError, did_you_mean
from agl_core.reading.runs import RUNS, policy_names, read_entry
from agl_core.training.checkpoints import CHECKPOINTS, Checkpoints

LATEST, BEST, STABLE = ALIASES = ("latest", "best", "stable")
"""Versions that move: of the last checkpoint, of that with the highest evaluation, of that marked by `promote`."""


@dataclass(frozen=True, slots=True)
class Version:
    """One set of weights that a run made, or, with step 0, started from."""

    run: Path
    policy: str
    name: str
    """What the policy is called: its run's name, and after a colon its own where the run has several."""
    step: int
    checkpoint: Path | None
    """None: what training started from."""

    def __str__(self) -> str:
        return f"{self.name}@{self.step}"

    @property
    def saved(self) -> Path | None:
        """The folder with the weights as transformers, or peft for an adapter, loads them."""
        return None if self.checkpoint is None else self.checkpoint / self.policy / "model"

    @property
    def is_adapter(self) -> bool:
        """Whether what was saved is an adapter of other weights."""
        return self.saved is not None and (self.saved / "adapter_config.json").is_file()


@dataclass(frozen=True, slots=True)
class Reference:
    """A policy, and which of its versions is meant."""

    run: Path
    policy: str
    name: str
    which: str
    """A step, or one of `ALIASES`."""

    def __str__(self) -> str:
        return f"{self.name}@{self.which}"

    def resolve(self) -> Version:
        """The version that is meant now. CheckpointError if there is none, with those that there are."""
        checkpoints = Checkpoints(self.run / CHECKPOINTS, keep=1)
        found = _steps(checkpoints, self.policy)
        if self.which not in ALIASES:
            step = int(self.which)
            if step and step not in found:
                raise CheckpointError(f"There is no {self}. {self._others(found)}")
            return Version(self.run, self.policy, self.name, step, found.get(step))
        marked = checkpoints.stable().get(self.policy) if self.which == STABLE else None
        if not found and marked != 0:
            raise CheckpointError(f"There is no {self}. {self._others(found)}")
        if self.which == LATEST:
            step = max(found)
        elif self.which == STABLE:
            if marked is None or (marked and marked not in found):
                why = "no version is marked as stable" if marked is None else f"its checkpoint, step {marked}, is gone"
                raise CheckpointError(f"There is no {self}: {why}. Mark one: agl policy promote {self.name}@STEP.")
            step = marked
        else:
            best = checkpoints.best()
            if best is None:
                raise CheckpointError(
                    f"There is no {self}: no checkpoint that is kept was evaluated at its step. {self._others(found)}"
                )
            step = next(step for step, path in found.items() if path == best)
        return Version(self.run, self.policy, self.name, step, found.get(step))

    def _others(self, found: Iterable[int]) -> str:
        names = [f"{self.name}@{step}" for step in found]
        if names:
            return f"{did_you_mean(str(self), names, '{}')}Its versions: {', '.join(names)}."
        entry = read_entry(self.run)
        if entry.state == "running":
            return f"{self.run} is being trained (step {entry.steps} of {entry.of_steps}) and has no checkpoint yet."
        return f"{self.run} has no checkpoint. Train first: agl train --resume {self.run}."


def parse(text: str) -> Reference:
    """The policy that a name means; a name without `@` means its latest version. ConfigError with the nearest names.

    The run is looked for, the version not yet.
    """
    before, at, which = text.rpartition("@")
    name, which = (before, which) if at else (text, LATEST)
    if which not in ALIASES and not (which.isascii() and which.isdecimal() and len(which) < 10):
        hint = did_you_mean(which, ALIASES, f"{name}@{{}}")
        raise ConfigError(f"'{text}' names no version. {hint}After the @ comes a step, or {', '.join(ALIASES)}.")
    run, policy = _find(name)
    which = which if which in ALIASES else str(int(which))
    return Reference(run, policy, called(run, policy), which)


def list_versions(run: Path) -> list[Version]:
    """What a run's checkpoints have, the oldest first."""
    checkpoints = Checkpoints(run / CHECKPOINTS, keep=1)
    found = [
        Version(run, policy, called(run, policy), step, path)
        for policy in policy_names(run)
        for step, path in _steps(checkpoints, policy).items()
    ]
    return sorted(found, key=lambda version: (version.step, version.policy))


def aliases(version: Version) -> Iterator[str]:
    """Those of `ALIASES` that mean this version now."""
    for alias in ALIASES:
        try:
            if Reference(version.run, version.policy, version.name, alias).resolve().step == version.step:
                yield alias
        except CheckpointError:
            continue


def _steps(checkpoints: Checkpoints, policy: str) -> dict[int, Path]:
    """The complete checkpoints that have this policy, by step, the oldest first."""
    return {int(path.name.rpartition("-")[2]): path for path in checkpoints.all() if (path / policy / "model").is_dir()}


def called(run: Path, policy: str) -> str:
    """What a policy is called: its run's name, and after a colon its own where the run has several."""
    name = run.resolve().name
    return name if len(policy_names(run)) == 1 else f"{name}:{policy}"


def _find(name: str) -> tuple[Path, str]:
    run = _folder(name)
    if run is None:
        before, colon, policy = name.rpartition(":")
        run = _folder(before) if colon else None
        if run is None:
            known = [file.parent.name for file in sorted(RUNS.glob(f"*/{CONFIG_FILE}"))]
            hint = did_you_mean(before or name, known, "{}")
            raise ConfigError(
                f"There is no run '{before or name}'. {hint}Runs here: {', '.join(known) or 'none below ./runs'}. A "
                f"policy is named RUN@STEP, where RUN is a folder or a name below ./runs: agl policy list."
            )
        if policy not in policy_names(run):
            raise ConfigError(f"{run} has no policy '{policy}'. Its policies: {', '.join(policy_names(run))}.")
        return run, policy
    found = policy_names(run)
    if len(found) != 1:
        if not found:
            raise ConfigError(f"{run} trains no policy: it is a recording.")
        each = ", ".join(f"{run.name}:{policy}" for policy in found)
        raise ConfigError(f"{run} has several policies. Name one of them: {each}.")
    return run, found[0]


def _folder(name: str) -> Path | None:
    return next((each for each in (Path(name), RUNS / name) if name and (each / CONFIG_FILE).is_file()), None)
