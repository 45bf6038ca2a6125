"""The output of a run while it goes on: its phases, a line for each step, the numbers by documented key."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from agl_core import private
from agl_core.capture.recording import jsonable
from agl_core.errors import CheckpointError, last_frames
from agl_core.learning.batch import BatchPlan, staleness
from agl_core.learning.certificate import Proof, certify
from agl_core.learning.health import answer, health_of, is_gibberish, is_refusal, is_repetitive, response_text
from agl_core.learning.tool_results import has_failed
from agl_core.protocols import KeepingTracker, Tracker
from agl_core.training.alarms import Alarm
from agl_core.training.checkpoints import HEADLINE_SET, RunState, model_links
from agl_core.types import Ending, Episode, FinishReason, Json, PrefixBreak, TrainingRecord, scored_return

logger = logging.getLogger(__name__)

BEST = 10
"""Rollouts of a step that trackers keep."""
LOSS = "loss"
PAIR_ACCURACY = "pair_accuracy"
"""The mode of an evaluation whose replies are recorded, where others have how replies are sampled."""
METRICS_FILE, SUMMARY_FILE = "metrics.jsonl", "summary.json"
"""In a run's folder."""


Advance: TypeAlias = Callable[[float, str], None]
"""Shows that a share (0 … 1) of a phase is done, and what is known so far, the reward for instance."""


class Observer:
    """Shows progress. This one shows nothing; subclasses show what they are for."""

    def phase(self, name: str, step: int) -> AbstractContextManager[Advance]:
        """A context in which a phase runs."""
        return nullcontext(lambda share, note: None)

    def begun(self) -> None:
        """Show that the run has begun, so that its folder stays."""

    def say(self, text: str) -> None:
        """Print one line that stays on the screen."""


def step_line(step: int, steps: int, metrics: Mapping[str, float], note: str = "") -> str:
    """A training step as one line: reward (or, without any, the accuracy on pairs or the loss), what else there is to
    note, mean prompt and response length, seconds.

    >>> step_line(4, 40, {"reward/mean": 0.5, "seconds/rollouts": 4.9, "seconds/update": 0.1})
    'step   4/40  reward 0.500  rollouts 4.9 s  update 0.1 s'
    """
    prompt, response = metrics.get("length/prompt"), metrics.get("length/response")
    lengths = "" if prompt is None or response is None else f"{prompt:.0f} + {response:.0f} tokens  "
    rollouts, update = metrics["seconds/rollouts"], metrics["seconds/update"]
    name, value = "reward", metrics.get("reward/mean")
    if value is None:
        name = PAIR_ACCURACY if of_update(PAIR_ACCURACY, metrics) else LOSS
        value = mean(of_update(name, metrics))
    return (
        f"{numbered(step, steps)}  {name.replace('_', ' ')} {value:.3f}  {f'{note}  ' if note else ''}{lengths}"
        f"rollouts {rollouts:.1f} s  update {update:.1f} s"
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
    """What an evaluation of one set says, by its name: the reward by mode, or loss and accuracy."""
    if entry["mode"] == LOSS:
        return {name: entry[name] for name in (LOSS, "accuracy") if name in entry}
    return {entry["mode"]: entry["reward"]}


def of_update(name: str, metrics: Mapping[str, float]) -> list[float]:
    """The values of an update's metric by this name, of each policy."""
    return [value for key, value in metrics.items() if re.fullmatch(rf"update/(.+/)?{name}", key)]


def numbered(step: int, steps: int) -> str:
    """How lines about a step begin."""
    return f"step {step:>3}/{steps}"


def mean(values: Iterable[float]) -> float:
    """The mean; NaN without values."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else math.nan


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Rewards with their components, endings, lengths, turns, calls and health of one set of rollouts.

    Rewards are also by part, for tasks of a mixture. `reward/mean` is of returns, because single calls may have rewards
    of their own; an episode that was dropped unscored counts as 0.
    """
    rewards = [scored_return(episode) or 0.0 for episode in episodes]
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
        "calls/prefix_broken": float(sum(t.prefix_broken not in (None, PrefixBreak.REQUEST) for t in transitions)),
        "calls/parse_errors": float(sum(t.parse_error is not None for t in transitions)),
        "calls/undelivered": float(sum(len({t.key.call for t in e.undelivered}) for e in episodes)),
        "calls/passed_through": float(sum(sum((e.passed_through or {}).values()) for e in episodes)),
        "calls/unattributed": float(sum(e.unattributed for e in episodes)),
        "tool_results/unjoined": float(sum(len(e.unjoined) for e in episodes)),
    }
    components: dict[str, float] = {}
    for component in (r for e in episodes for r in e.rewards):
        components[component.name] = components.get(component.name, 0.0) + component.value
    metrics |= {f"reward/{name}": total / len(episodes) for name, total in components.items()}
    by_part: dict[str, list[float]] = {}
    for episode, reward in zip(episodes, rewards, strict=True):
        part = episode.task.metadata.get("part")
        if episode.task.id.startswith(f"{part}/"):  # It is of a mixture.
            by_part.setdefault(str(part), []).append(reward)
    metrics |= {f"reward/part/{part}": mean(of_part) for part, of_part in by_part.items()}
    breaks = Counter(t.prefix_broken.value for t in transitions if t.prefix_broken)
    metrics |= {f"calls/prefix_broken/{cause}": float(count) for cause, count in breaks.items()}
    endings = Counter(e.ending.value for e in episodes)
    metrics |= {f"ending/{name}": float(count) for name, count in endings.items()}
    metrics |= health_metrics(episodes)
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def health_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """The verdicts on these rollouts with their reasons, and what their responses and tool calls are like."""
    healths = [health_of(episode) for episode in episodes]
    counts = Counter(f"health/{health.verdict}" for health in healths)
    counts.update(f"unhealthy/{symptom}" for health in healths for symptom in health.symptoms)
    counts.update(f"unobserved/{evidence}" for health in healths for evidence in health.missing)
    transitions = [t for e in episodes for t in e.transitions]
    answers = [text.strip() for e in episodes if e.ending is Ending.FINISHED and (text := answer(e)) is not None]
    shares = {
        "responses/repetitive": mean(is_repetitive(response_text(t)) for t in transitions),
        "responses/gibberish": mean(map(is_gibberish, transitions)),
        "answers/empty": mean(not text for text in answers),
        "answers/question": mean(text.endswith(("?", "？")) for text in answers),
        "answers/refused": mean(map(is_refusal, answers)),
        "tool_results/failed": mean(has_failed(result) for t in transitions for result in t.tool_results),
    }
    return {key: float(count) for key, count in sorted(counts.items())} | shares


def contrast_metrics(groups: Iterable[Sequence[Episode]], plan: BatchPlan) -> dict[str, float]:
    """The share of groups in which a comparison has nothing to learn from."""
    compared = [group for group in groups if len(group) > 1]
    return {"groups/no_contrast": mean(not plan.has_contrast(group) for group in compared)} if compared else {}


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


def counts(steps: Iterable[Mapping[str, float]], prefix: str) -> Counter[str]:
    """The totals of the keys with this prefix, over all steps."""
    total: Counter[str] = Counter()
    for step in steps:
        total.update({key.removeprefix(prefix): int(n) for key, n in step.items() if key.startswith(prefix)})
    return total


def drop_metrics(reasons: Iterable[str | None]) -> dict[str, float]:
    return {f"dropped/{reason}": float(n) for reason, n in Counter(r for r in reasons if r).items()}


def proof_metrics(episodes: Iterable[Episode], records: Iterable[TrainingRecord]) -> dict[str, float]:
    """The trained tokens by what is proved of them: `proved/exact`, and others by what is missing."""
    transitions = {transition.key: transition for episode in episodes for transition in episode.transitions}
    proofs: Counter[Proof] = Counter()
    for record in records:
        if record.dropped is None and (certificate := certify(transitions[record.key], record)) is not None:
            proofs += certificate.counts
    return {f"proved/{proof}": float(count) for proof, count in proofs.items()}


class MetricsLog:
    """`metrics.jsonl`, one line per training step and per evaluation, and the trackers of the run."""

    def __init__(self, path: Path, trackers: Mapping[str, Tracker], restart: int = 0) -> None:
        self._path, self._trackers = path, trackers
        self.restart = restart
        """The restart of the lines that are written from now on."""
        self._failed: set[str] = set()
        """The trackers that raised, by name."""

    def steps(self) -> Iterator[dict[str, float]]:
        """The numbers of each training step, from the file: they may be many."""
        if self._path.exists():
            with open(self._path, "rb") as file:
                for values in map(orjson.loads, file):
                    if values["kind"] == "train":
                        yield {key: value for key, value in values.items() if isinstance(value, float)}

    def forget_after(self, step: int) -> None:
        """Remove the lines of superseded steps, when a run resumes from an earlier checkpoint.

        A last line that a kill or a full disk truncated is removed too; CheckpointError if another line cannot be read.
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
                        f"Line {number} of {self._path} is not a line of metrics ({error!r}). Remove or repair it, and "
                        f"resume again."
                    ) from error
        private.replace(self._path, b"".join(line + b"\n" for line in kept))

    def write(
        self, step: int, kind: str, metrics: Mapping[str, float], alarms: Sequence[Alarm] = (), stopped: str = ""
    ) -> None:
        """Append one line; `kind` is `train` or `eval`, `alarms` are those that were raised since the last line.

        `stopped` says why the run ends here, before its last step.

        Trackers get the numbers of a step under `train/`; those of an evaluation begin with the name of its set.
        """
        line: dict[str, Any] = {"step": step, "kind": kind, "restart": self.restart, "time": time.time(), **metrics}
        if alarms:
            line["alarms"] = [
                {key: text.encode(errors="replace").decode() for key, text in dataclasses.asdict(alarm).items()}
                for alarm in alarms
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
    steps: Sequence[Mapping[str, float]]
    """The numbers of each training step."""
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

        Of a recorded set there are `loss` and `accuracy` instead.
        """
        of_set = [e for e in self.state.evaluations if e["set"] == set_name]
        steps = sorted({e["step"] for e in of_set})
        names = (LOSS, "accuracy") if any(e["mode"] == LOSS for e in of_set) else ("greedy", "sampled")

        def at(evaluated: list[int]) -> dict[str, float | None]:
            scores = {k: v for e in of_set if e["step"] in evaluated for k, v in scores_of(e).items()}
            return {name: scores.get(name) for name in names}

        return {"before": at(steps[:1]), "after": at(steps[1:][-1:])}

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
    def headline(self) -> str:
        return HEADLINE_SET if HEADLINE_SET in self.sets or not self.sets else self.sets[0]

    @property
    def proved(self) -> Counter[str]:
        """The trained tokens by what is proved of them (`agl_core.learning.certificate.Proof`)."""
        return counts(self.steps, "proved/")

    @property
    def exact_share(self) -> float | None:
        """The share of trained tokens that are proved exact; None if the run sampled none of them."""
        return self.proved[Proof.EXACT] / self.proved.total() if self.proved and self.samples else None

    def as_json(self, verdict: Mapping[str, Json] | None = None) -> dict[str, Any]:
        state, transitions = self.state, counts(self.steps, "transitions/")
        return {
            "verdict": verdict,
            "reward": self.rewards(self.headline),
            "rewards": {name: self.rewards(name) for name in self.sets},
            "steps": state.step,
            "seconds": state.seconds,
            "peak_rss_bytes": state.peak_rss_bytes,
            "rollouts": counts(self.steps, "ending/"),
            "llm_calls": round(sum(step["rollout/calls"] * step["rollouts"] for step in self.steps))
            + sum(entry.get("calls", 0) for entry in state.evaluations),
            "transitions": {
                "kept": transitions["kept"],
                "without_advantage": transitions["without_advantage"],
                "dropped": counts(self.steps, "dropped/"),
            },
            "trained_tokens": {"count": self.proved.total(), "exact_share": self.exact_share, "proved": self.proved},
            "seed": self.seed,
            "interrupted": self.stopped_by is not None,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "best": str(self.best) if self.best else None,
            "models": [str(model) for model in self.models],
            "adapter_problems": self.problems,
            "evaluations": state.evaluations,
            "train_rewards": [step["reward/mean"] for step in self.steps if "reward/mean" in step],
        }

    def write(self, verdict: Mapping[str, Json] | None = None) -> None:
        """Write the file, with what the run came to (`agl_core.reading.metrics.verdict_of`)."""
        private.replace(self.file, orjson.dumps(self.as_json(verdict), option=orjson.OPT_INDENT_2))
