"""What is known of a version: its run, the evaluations behind it, and what it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agl_core.config import CONFIG_FILE
from agl_core.errors import ConfigError
from agl_core.reading.metrics import MetricsLine, read_metrics
from agl_core.reading.runs import RunStatus, list_runs, policy_names, read_entry
from agl_core.training.checkpoints import HEADLINE_SET
from agl_online.policies.naming import Version, aliases, list_versions

_MODES = {"greedy": 0, "sampled": 1}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean reward of one held-out set in one mode."""

    set: str
    mode: str
    reward: float
    rollouts: int | None


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One version as a list shows it."""

    name: str
    """As `calc@40`."""
    run: Path
    state: RunStatus
    policy: str
    step: int
    aliases: Sequence[str]
    kind: str
    """`full` or `adapter`."""
    evaluations: Sequence[Evaluation]
    """Those of this step; none if it was not evaluated."""
    size: int
    """Bytes of its weights and tokenizer."""
    folder: Path

    @property
    def headline(self) -> Evaluation | None:
        """The evaluation of the set `eval`, or else of the first one, in the first mode."""
        of_set = [each for each in self.evaluations if each.set == HEADLINE_SET]
        return next(iter(of_set or self.evaluations), None)


def list_policies(folder: Path) -> list[PolicyEntry]:
    """The versions of a run, or of all runs below a folder. ConfigError if there is no run."""
    if (folder / CONFIG_FILE).is_file():
        runs = [folder]
    else:
        runs = [each.folder for each in list_runs(folder)]
        if not runs:
            raise ConfigError(f"There are no runs in {folder}. Name the folder that holds them, or train first.")
    return [entry for run in runs if policy_names(run) for entry in _of_run(run)]


def evaluations_of(lines: Sequence[MetricsLine], step: int) -> list[Evaluation]:
    """The last evaluation of each set and mode at this step."""
    values: dict[str, float] = {}
    for line in lines:
        if line.kind == "eval" and line.step == step:
            values |= line.values
    found = []
    for key, reward in values.items():
        name, slash, metric = key.partition("/reward/mean")
        held_out, _, mode = name.rpartition("/")
        if slash and not metric and held_out:
            found.append(Evaluation(held_out, mode, reward, _count(values, name)))
    return sorted(found, key=lambda each: (each.set, _MODES.get(each.mode, len(_MODES))))


def _of_run(run: Path) -> list[PolicyEntry]:
    lines, state = read_metrics(run), read_entry(run).state
    return [_entry(version, state, evaluations_of(lines, version.step)) for version in list_versions(run)]


def _entry(version: Version, state: RunStatus, evaluations: Sequence[Evaluation]) -> PolicyEntry:
    assert version.saved is not None
    return PolicyEntry(
        name=str(version),
        run=version.run,
        state=state,
        policy=version.policy,
        step=version.step,
        aliases=list(aliases(version)),
        kind="adapter" if version.is_adapter else "full",
        evaluations=evaluations,
        size=sum(file.stat().st_size for file in version.saved.rglob("*") if file.is_file()),
        folder=version.saved,
    )


def _count(values: Mapping[str, float], name: str) -> int | None:
    count = values.get(f"{name}/rollouts")
    return None if count is None else int(count)
