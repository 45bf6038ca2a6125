"""The numbers of a step, by documented key (docs/metrics.md), and where they are written."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from agl_core.errors import CheckpointError
from agl_core.learning import staleness
from agl_core.protocols import Tracker
from agl_core.types import Episode, FinishReason


def mean(values: Iterable[float]) -> float:
    """The mean, NaN of nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else math.nan


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Rewards and their parts, endings, lengths, turns and calls of one set of rollouts.

    An episode without a terminal reward (it was dropped) counts as 0 in `reward/mean`.
    """
    rewards = [e.terminal or 0.0 for e in episodes]
    transitions = [t for e in episodes for t in e.transitions]
    metrics = {
        "reward/mean": mean(rewards),
        "reward/std": math.sqrt(mean([(r - mean(rewards)) ** 2 for r in rewards])) if rewards else math.nan,
        "rollouts": float(len(episodes)),
        "rollout/turns": mean(len(e.transitions) for e in episodes),
        "rollout/calls": mean(len({t.key.call for t in e.transitions}) for e in episodes),
        "rollout/outcomes": mean(sum(len(t.outcomes) for t in e.transitions) for e in episodes),
        "length/prompt": mean(len(t.prompt_ids) for t in transitions if t.prompt_ids is not None),
        "length/response": mean(len(t.response_ids) for t in transitions if t.response_ids is not None),
        "length/cut": mean(t.finish_reason is FinishReason.LENGTH for t in transitions),
        "calls/prefix_broken": float(sum(t.prefix_broken for t in transitions)),
        "calls/parse_errors": float(sum(t.parse_error is not None for t in transitions)),
        "outcomes/unjoined": float(sum(len(e.unjoined) for e in episodes)),
    }
    parts: dict[str, float] = {}
    for reward in (r for e in episodes for r in e.rewards):
        parts[reward.name] = parts.get(reward.name, 0.0) + reward.value
    metrics |= {f"reward/{name}": total / len(episodes) for name, total in parts.items()}
    endings = Counter(e.ending.value for e in episodes)
    metrics |= {f"ending/{name}": float(count) for name, count in endings.items()}
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def staleness_metrics(episodes: Sequence[Episode], versions: Mapping[str, int]) -> dict[str, float]:
    """How old the episodes are, in updates: the oldest transition of each; `versions` are the trainer's."""
    ages = [staleness(episode, versions) for episode in episodes if episode.transitions]
    return {"staleness/mean": mean(ages), "staleness/max": float(max(ages))} if ages else {}


def update_metrics(by_policy: Mapping[str, Mapping[str, float]], *, several: bool) -> dict[str, float]:
    """What the engine said of a step's updates: `update/KEY`; in a run with several policies, `update/POLICY/KEY`.

    >>> update_metrics({"writer": {"loss": 0.5}}, several=True)
    {'update/writer/loss': 0.5}
    """
    return {
        f"update/{policy}/{key}" if several else f"update/{key}": value
        for policy, metrics in by_policy.items()
        for key, value in metrics.items()
    }


def drop_metrics(reasons: Iterable[str | None]) -> dict[str, float]:
    """Transitions left out of training, by reason."""
    return {f"dropped/{reason}": float(n) for reason, n in Counter(r for r in reasons if r).items()}


class MetricsLog:
    """`metrics.jsonl`: one line per training step and per evaluation, and whatever trackers the run has."""

    def __init__(self, path: Path, trackers: Sequence[Tracker], incarnation: int) -> None:
        self._path, self._trackers, self._incarnation = path, trackers, incarnation

    def forget_after(self, step: int) -> None:
        """Take out the lines of superseded steps, when a run resumes from an earlier checkpoint.

        A last line that a kill or a full disk cut off goes with them; CheckpointError if another one cannot be read.
        """
        if not self._path.exists():
            return
        lines, kept = self._path.read_bytes().splitlines(), []
        for number, line in enumerate(lines, 1):
            try:
                if orjson.loads(line)["step"] <= step:
                    kept.append(line)
            except (orjson.JSONDecodeError, LookupError, TypeError) as error:
                if number < len(lines):
                    raise CheckpointError(
                        f"Line {number} of {self._path} is no line of metrics ({error!r}). Remove it, or mend it, and "
                        f"resume again."
                    ) from error
        part = self._path.with_suffix(".part")
        part.write_bytes(b"".join(line + b"\n" for line in kept))
        os.replace(part, self._path)

    def write(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        """Append one line; `kind` is `train` or `eval`."""
        line: dict[str, Any] = {"step": step, "kind": kind, "incarnation": self._incarnation, **metrics}
        with self._path.open("ab") as file:
            file.write(orjson.dumps(line) + b"\n")
        for tracker in self._trackers:
            tracker.log(step, {f"{kind}/{key}": value for key, value in metrics.items()})

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
