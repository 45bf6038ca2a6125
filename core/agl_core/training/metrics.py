"""The numbers of a step, by documented key (docs/metrics.md), and where they are written."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from agl_core import private
from agl_core.capture.recording import jsonable
from agl_core.errors import CheckpointError, last_frames
from agl_core.learning import health_of, staleness
from agl_core.learning.health import answer, has_failed, is_gibberish, is_refusal, is_repetitive, response_text
from agl_core.protocols import KeepingTracker, Tracker
from agl_core.returns import are_equal, episode_return
from agl_core.training.alarms import Alarm
from agl_core.types import Ending, Episode, FinishReason, Mode

logger = logging.getLogger(__name__)

BEST = 10
"""Rollouts of a step that trackers keep."""
METRICS_FILE = "metrics.jsonl"
"""The metrics file in a run's folder."""


def mean(values: Iterable[float]) -> float:
    """The mean; NaN without values."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else math.nan


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Rewards and their parts, endings, lengths, turns, calls and health of one set of rollouts.

    An episode without a terminal reward (it was dropped) counts as 0 in `reward/mean`. Of a rollout that was opened
    from outside it is the return, for each reply may have a reward of its own.
    """
    rewards = [episode_return(e) if e.mode is Mode.USE else e.terminal or 0.0 for e in episodes]
    transitions = [t for e in episodes for t in e.transitions]
    metrics = {
        "reward/mean": mean(rewards),
        "reward/std": math.sqrt(mean([(r - mean(rewards)) ** 2 for r in rewards])) if rewards else math.nan,
        "rollouts": float(len(episodes)),
        "rollout/turns": mean(len(e.transitions) for e in episodes),
        "rollout/calls": mean(len({t.key.call for t in e.transitions}) for e in episodes),
        "rollout/tool_results": mean(sum(len(t.tool_results) for t in e.transitions) for e in episodes),
        "length/prompt": mean(len(t.prompt_ids) for t in transitions if t.prompt_ids is not None),
        "length/response": mean(len(t.response_ids) for t in transitions if t.response_ids is not None),
        "length/truncated": mean(t.finish_reason is FinishReason.LENGTH for t in transitions),
        "calls/prefix_broken": float(sum(t.prefix_broken for t in transitions)),
        "calls/parse_errors": float(sum(t.parse_error is not None for t in transitions)),
        "calls/undelivered": float(sum(len({t.key.call for t in e.undelivered}) for e in episodes)),
        "calls/passed_through": float(sum(sum((e.passed_through or {}).values()) for e in episodes)),
        "calls/unattributed": float(sum(e.unattributed for e in episodes)),
        "tool_results/unjoined": float(sum(len(e.unjoined) for e in episodes)),
    }
    parts: dict[str, float] = {}
    for reward in (r for e in episodes for r in e.rewards):
        parts[reward.name] = parts.get(reward.name, 0.0) + reward.value
    metrics |= {f"reward/{name}": total / len(episodes) for name, total in parts.items()}
    endings = Counter(e.ending.value for e in episodes)
    metrics |= {f"ending/{name}": float(count) for name, count in endings.items()}
    metrics |= health_metrics(episodes)
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def health_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """The verdicts on these rollouts with their reasons, and what their responses and tool calls are like."""
    found = [health_of(episode) for episode in episodes]
    counts = Counter(f"health/{each.verdict}" for each in found)
    counts.update(f"unhealthy/{symptom}" for each in found for symptom in each.symptoms)
    counts.update(f"unobserved/{evidence}" for each in found for evidence in each.missing)
    transitions = [t for e in episodes for t in e.transitions]
    answers = [said.strip() for e in episodes if e.ending is Ending.FINISHED and (said := answer(e)) is not None]
    shares = {
        "responses/repetitive": mean(is_repetitive(response_text(t)) for t in transitions),
        "responses/gibberish": mean(map(is_gibberish, transitions)),
        "answers/empty": mean(not said for said in answers),
        "answers/question": mean(said.endswith(("?", "？")) for said in answers),
        "answers/refused": mean(map(is_refusal, answers)),
        "tool_results/failed": mean(has_failed(each) for t in transitions for each in t.tool_results),
    }
    return {key: float(count) for key, count in sorted(counts.items())} | shares


def contrast_metrics(groups: Iterable[Sequence[Episode]]) -> dict[str, float]:
    """The share of groups in which all rewards are equal, so that a comparison has nothing to learn from."""
    rewards = [[e.terminal or 0.0 for e in group] for group in groups if len(group) > 1]
    return {"groups/no_contrast": mean(map(are_equal, rewards))} if rewards else {}


def staleness_metrics(episodes: Sequence[Episode], versions: Mapping[str, int]) -> dict[str, float]:
    """How old the episodes are, in updates: the oldest transition of each; `versions` are the trainer's."""
    ages = [staleness(episode, versions) for episode in episodes if episode.transitions]
    return {"staleness/mean": mean(ages), "staleness/max": float(max(ages))} if ages else {}


def update_metrics(by_policy: Mapping[str, Mapping[str, float]], *, several: bool) -> dict[str, float]:
    """The engine's metrics of a step's updates: `update/KEY`; in a run with several policies, `update/POLICY/KEY`.

    >>> update_metrics({"writer": {"loss": 0.5}}, several=True)
    {'update/writer/loss': 0.5}
    """
    return {
        f"update/{policy}/{key}" if several else f"update/{key}": value
        for policy, metrics in by_policy.items()
        for key, value in metrics.items()
    }


def drop_metrics(reasons: Iterable[str | None]) -> dict[str, float]:
    return {f"dropped/{reason}": float(n) for reason, n in Counter(r for r in reasons if r).items()}


class MetricsLog:
    """`metrics.jsonl`, one line per training step and per evaluation, and the trackers of the run."""

    def __init__(self, path: Path, trackers: Mapping[str, Tracker], restart: int = 0) -> None:
        self._path, self._trackers = path, trackers
        self.restart = restart
        """The restart of the lines that are written from now on."""
        self._failed: set[str] = set()
        """The trackers that raised, by name."""

    def forget_after(self, step: int) -> list[dict[str, float]]:
        """Remove the lines of superseded steps, when a run resumes from an earlier checkpoint.

        Returns the numbers of the training steps that are left.

        A last line that a kill or a full disk truncated is removed too; CheckpointError if another line cannot be read.
        """
        if not self._path.exists():
            return []
        lines, kept, steps = self._path.read_bytes().splitlines(), [], []
        for number, line in enumerate(lines, 1):
            try:
                read = orjson.loads(line)
                if read["step"] <= step:
                    kept.append(line)
                    if read.get("kind") == "train":
                        steps.append({key: value for key, value in read.items() if isinstance(value, float)})
            except (orjson.JSONDecodeError, LookupError, TypeError) as error:
                if number < len(lines):
                    raise CheckpointError(
                        f"Line {number} of {self._path} is not a line of metrics ({error!r}). Remove or mend it, and "
                        f"resume again."
                    ) from error
        private.replace(self._path, b"".join(line + b"\n" for line in kept))
        return steps

    def write(self, step: int, kind: str, metrics: Mapping[str, float], alarms: Sequence[Alarm] = ()) -> None:
        """Append one line; `kind` is `train` or `eval`, `alarms` are those that were raised since the last line.

        Trackers get the numbers of a step under `train/`; those of an evaluation begin with the name of its set.
        """
        line: dict[str, Any] = {"step": step, "kind": kind, "restart": self.restart, "time": time.time(), **metrics}
        if alarms:
            line["alarms"] = [
                {key: text.encode(errors="replace").decode() for key, text in dataclasses.asdict(alarm).items()}
                for alarm in alarms
            ]
        with open(self._path, "ab", opener=private.opener) as file:
            file.write(orjson.dumps(line) + b"\n")
        tracked = {f"train/{key}": value for key, value in metrics.items()} if kind == "train" else metrics
        for name, tracker in self._trackers.items():
            with self._reported(name):
                tracker.log(step, tracked)

    def keep(self, step: int, checkpoint: Path, episodes: Sequence[Episode]) -> None:
        """Give a checkpoint, and the best of the step's rollouts, to the trackers that keep them."""
        best = sorted(episodes, key=lambda episode: -(episode.terminal or 0.0))[:BEST]
        rows = [
            {
                "rollout": episode.rollout,
                "reward": episode.terminal,
                "ending": episode.ending.value,
                "task": jsonable(episode.task.input),
                "result": jsonable(episode.result),
            }
            for episode in best
        ]
        for name, tracker in self._trackers.items():
            if isinstance(tracker, KeepingTracker):
                with self._reported(name):
                    tracker.keep(step, checkpoint, rows)

    def close(self) -> None:
        for name, tracker in self._trackers.items():
            with self._reported(name):
                tracker.close()

    @contextmanager
    def _reported(self, tracker: str) -> Iterator[None]:
        """An exception of a tracker does not stop training: it is logged once."""
        try:
            yield
        except Exception as error:
            if tracker not in self._failed:
                logger.warning(
                    "The tracker '%s' failed (%s: %s). Training goes on, and the tracker is given what comes later; "
                    "what it misses is in %s.\n%s",
                    tracker,
                    type(error).__name__,
                    error,
                    self._path,
                    last_frames(error),
                )
            self._failed.add(tracker)
