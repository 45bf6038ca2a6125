"""The output of a run: its phases, a line for each step, the file of its numbers, trackers, and its summary."""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import orjson
from pydantic import Field

from agl_core import private
from agl_core.config.sections import Section
from agl_core.errors import CheckpointError, last_frames
from agl_core.protocols import KeepingTracker, Tracker
from agl_core.types import Episode, scored_return
from agl_core.types.forms import jsonable
from agl_server.health.certificate import Proof
from agl_server.health.rollouts import mean
from agl_server.health.table import Alarm
from agl_server.health.verdict import (
    HEADLINE_SET,
    LOSS,
    PAIR_ACCURACY,
    MetricsLine,
    RunVerdict,
    counts,
    of_update,
    parsed_lines,
    verdict_of,
)
from agl_server.training.checkpoints import RunState, model_links

logger = logging.getLogger(__name__)

BEST = 10
"""Rollouts of a step that trackers keep."""
SUMMARY_FILE = "summary.json"

Advance: TypeAlias = Callable[[float, str], None]
"""Shows that a share (0 … 1) of a phase is done, and what is known so far, the reward for instance."""


class Prices(Section):
    """Prices of a million tokens, in your own currency. Without this table a run shows its tokens alone."""

    prefill: float = Field(0.0, ge=0)
    """Tokens of prompts."""
    sample: float = Field(0.0, ge=0)
    """Tokens of replies."""
    train: float = Field(0.0, ge=0)
    """Tokens of an update's passes, also of those that only score: Tinker charges both alike."""

    @classmethod
    def of(cls, tables: Mapping[str, Any]) -> Prices:
        return cls(**tables.get("prices", {}))

    def cost(self, tokens: Mapping[str, float]) -> float:
        """The cost of tokens by kind; 0 without prices."""
        prices = {"prefilled": self.prefill, "decoded": self.sample, "trained": self.train, "scored": self.train}
        return sum(prices.get(kind, 0.0) * count for kind, count in tokens.items()) / 1e6

    def describe(self, tokens: Mapping[str, float]) -> str:
        """Tokens by kind in words, and their cost if there are prices."""
        counted = ", ".join(f"{count:,.0f} tokens {kind}" for kind, count in tokens.items()) or "not counted"
        return counted.replace("decoded", "sampled") + (f"; cost {cost:,.2f}" if (cost := self.cost(tokens)) else "")


class Observer:
    """Shows progress. This one shows nothing; subclasses show what they are for."""

    def phase(self, name: str, step: int) -> AbstractContextManager[Advance]:
        return nullcontext(lambda share, note: None)

    def begun(self) -> None:
        """Show that the run has begun, so that its folder stays."""

    def say(self, text: str) -> None:
        """Print one line that stays on the screen."""


def step_line(step: int, steps: int, metrics: Mapping[str, float], note: str = "") -> str:
    """A training step as one line: reward (else the accuracy on pairs, or the loss), note, mean lengths, seconds, cost.

    >>> step_line(4, 40, {"reward/mean": 0.5, "seconds/rollouts": 4.9, "seconds/update": 0.1, "cost": 0.12})
    'step   4/40  reward 0.500  rollouts 4.9 s  update 0.1 s  cost 0.12'
    """
    prompt, response = metrics.get("length/prompt"), metrics.get("length/response")
    lengths = "" if prompt is None or response is None else f"{prompt:.0f} + {response:.0f} tokens  "
    rollouts, update, cost = metrics["seconds/rollouts"], metrics["seconds/update"], metrics.get("cost")
    name, value = "reward", metrics.get("reward/mean")
    if value is None:
        name = PAIR_ACCURACY if of_update(PAIR_ACCURACY, metrics) else LOSS
        value = mean(of_update(name, metrics))
    return (
        f"{numbered(step, steps)}  {name.replace('_', ' ')} {value:.3f}  {f'{note}  ' if note else ''}{lengths}"
        f"rollouts {rollouts:.1f} s  update {update:.1f} s{f'  cost {cost:.3g}' if cost else ''}"
    )


def evaluation_line(step: int, steps: int, entries: Sequence[Mapping[str, Any]]) -> str:
    """An evaluation as one line: the reward of each set and mode, or the loss and accuracy of its replies, seconds.

    >>> evaluation_line(20, 40, [{"set": "eval", "mode": "greedy", "reward": 0.25, "seconds": 3.0}])
    'step  20/40  eval greedy 0.250  3.0 s'
    >>> evaluation_line(20, 40, [{"set": "eval", "mode": "loss", "loss": 1.5, "accuracy": 0.5, "seconds": 3.0}])
    'step  20/40  eval loss 1.500  eval accuracy 0.500  3.0 s'
    """
    scores = "  ".join(f"{e['set']} {name} {value:.3f}" for e in entries for name, value in scores_of(e).items())
    return f"{numbered(step, steps)}  {scores}  {sum(entry['seconds'] for entry in entries):.1f} s"


def scores_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """An evaluation's figures for one set by name: the reward by mode, or loss and accuracy."""
    if entry["mode"] == LOSS:
        return {name: entry[name] for name in (LOSS, "accuracy") if name in entry}
    return {entry["mode"]: entry["reward"]}


def numbered(step: int, steps: int) -> str:
    """How lines about a step begin."""
    return f"step {step:>3}/{steps}"


class MetricsLog:
    """`metrics.jsonl`, one line per training step and per evaluation, and the trackers of the run."""

    def __init__(self, path: Path, trackers: Mapping[str, Tracker], restart: int = 0) -> None:
        self._path, self._trackers = path, trackers
        self.restart = restart
        """The restart of the lines that are written from now on."""
        self._failed: set[str] = set()

    def forget_after(self, step: int) -> None:
        """Remove the lines of later steps, and a truncated last one; CheckpointError if another line cannot be read."""
        parsed = list(parsed_lines(self._path))
        for number, _, line in parsed[:-1]:
            if isinstance(line, Exception):
                raise CheckpointError(
                    f"Line {number} of {self._path} is not a line of metrics ({line!r}). Remove or repair it, and "
                    f"resume again."
                ) from line
        kept = [text for _, text, line in parsed if isinstance(line, MetricsLine) and line.step <= step]
        if parsed:
            private.replace(self._path, b"".join(text.rstrip(b"\n") + b"\n" for text in kept))

    def write(
        self, step: int, kind: str, metrics: Mapping[str, float], alarms: Sequence[Alarm] = (), stopped: str = ""
    ) -> None:
        """Append a `MetricsLine`. Trackers get the numbers of a step under `train/`, of an evaluation under its set."""
        line: dict[str, Any] = {"step": step, "kind": kind, "restart": self.restart, "time": time.time(), **metrics}
        if alarms:
            line["alarms"] = [
                {key: text.encode(errors="replace").decode() for key, text in asdict(alarm).items()} for alarm in alarms
            ]
        if stopped:
            line["stopped"] = stopped
        with open(self._path, "ab", opener=private.opener) as file:
            file.write(orjson.dumps(line) + b"\n")
        tracked = {f"train/{key}": value for key, value in metrics.items()} if kind == "train" else metrics
        for name, tracker in self._trackers.items():
            with self._reported(name):
                tracker.log(step, tracked)

    def keep(self, step: int, episodes: Sequence[Episode]) -> None:
        """Give the best of the step's rollouts to the trackers that keep them."""
        best = sorted(episodes, key=lambda episode: -(scored_return(episode) or 0.0))[:BEST]
        rows = [
            {
                "rollout": episode.rollout,
                "reward": scored_return(episode),
                "ending": episode.ending.value,
                "task": jsonable(episode.task.input),
                "result": jsonable(episode.result),
            }
            for episode in best
        ]
        for name, tracker in self._trackers.items():
            if isinstance(tracker, KeepingTracker) and rows:
                with self._reported(name):
                    tracker.keep(step, rows)

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


@dataclass(frozen=True)
class Summary:
    """The result of a run (`summary.json`)."""

    run_dir: Path
    seed: int
    state: RunState
    lines: Sequence[MetricsLine]
    stopped_by: signal.Signals | None
    """The signal that stopped it early: Ctrl-C is SIGINT."""
    checkpoint: Path | None
    best: Path | None
    """The checkpoint with the best evaluation."""
    problems: dict[str, int]
    """Failures of adapters."""
    samples: bool = True
    """False if all that was trained on was recorded before."""

    def rewards(self, set_name: str = HEADLINE_SET) -> dict[str, dict[str, float | None]]:
        """`{"before": {"greedy": …, "sampled": …}, "after": …}` of one held-out set; None: not evaluated (again).

        A recorded set has `loss` and `accuracy` instead.
        """
        of_set = [e for e in self.state.evaluations if e["set"] == set_name]
        steps = sorted({e["step"] for e in of_set})
        names = (LOSS, "accuracy") if any(e["mode"] == LOSS for e in of_set) else ("greedy", "sampled")

        def at(evaluated: list[int]) -> dict[str, float | None]:
            scores = {k: v for e in of_set if e["step"] in evaluated for k, v in scores_of(e).items()}
            return {name: scores.get(name) for name in names}

        return {"before": at(steps[:1]), "after": at(steps[1:][-1:])}

    @property
    def steps(self) -> list[Mapping[str, float]]:
        return [line.values for line in self.lines if line.kind == "train"]

    @property
    def verdict(self) -> RunVerdict | None:
        return verdict_of(self.lines)

    @property
    def file(self) -> Path:
        return self.run_dir / SUMMARY_FILE

    @property
    def sets(self) -> list[str]:
        """The held-out sets, in the order of their evaluation."""
        return list(dict.fromkeys(e["set"] for e in self.state.evaluations))

    @property
    def models(self) -> list[Path]:
        """The latest weights of each policy, as transformers loads them."""
        return [] if self.checkpoint is None else [link for link in model_links(self.checkpoint) if link.exists()]

    @property
    def proved(self) -> Counter[str]:
        """The trained tokens by what is proved of them (`agl_server.health.certificate.Proof`)."""
        return counts(self.steps, "proved/")

    @property
    def exact_share(self) -> float | None:
        """The share of trained tokens that are proved exact; None if the run sampled none of them."""
        return self.proved[Proof.EXACT] / self.proved.total() if self.proved and self.samples else None

    def as_json(self) -> dict[str, Any]:
        state, steps, verdict = self.state, self.steps, self.verdict
        transitions = counts(steps, "transitions/")
        headline = HEADLINE_SET if HEADLINE_SET in self.sets or not self.sets else self.sets[0]
        return {
            "verdict": None if verdict is None else asdict(verdict),
            "reward": self.rewards(headline),
            "rewards": {name: self.rewards(name) for name in self.sets},
            "steps": state.step,
            "seconds": state.seconds,
            "peak_rss_bytes": state.peak_rss_bytes,
            "rollouts": counts(steps, "ending/"),
            "llm_calls": round(sum(step["rollout/calls"] * step["rollouts"] for step in steps))
            + sum(entry.get("calls", 0) for entry in state.evaluations),
            "transitions": {
                "kept": transitions["kept"],
                "without_advantage": transitions["without_advantage"],
                "dropped": counts(steps, "dropped/"),
            },
            "trained_tokens": {"count": self.proved.total(), "exact_share": self.exact_share, "proved": self.proved},
            "tokens": state.tokens,
            "cost": Prices.of(state.config).cost(state.tokens) or None,
            "seed": self.seed,
            "interrupted": self.stopped_by is not None,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "best": str(self.best) if self.best else None,
            "models": [str(model) for model in self.models],
            "adapter_problems": self.problems,
            "evaluations": state.evaluations,
            "train_rewards": [step["reward/mean"] for step in steps if "reward/mean" in step],
        }

    def write(self) -> None:
        private.replace(self.file, orjson.dumps(self.as_json(), option=orjson.OPT_INDENT_2))
