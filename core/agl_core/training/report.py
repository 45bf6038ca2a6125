"""What a run reports: its progress, a line for each step, and its result (`summary.json`)."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from agl_core import private
from agl_core.protocols import Upstream
from agl_core.training.checkpoints import HEADLINE_SET, RunState, model_links

SUMMARY_FILE = "summary.json"


class Phase(Protocol):
    """One phase under way: rollouts, update or evaluation."""

    def advance(self, share: float, note: str = "") -> None:
        """`share` of it (0 … 1) is done; `note` is what is known so far, the reward for instance."""


class Observer(Protocol):
    """Shows progress; the loop works the same without one."""

    def phase(self, name: str, step: int) -> AbstractContextManager[Phase]:
        """A context in which a phase runs."""

    def say(self, text: str) -> None:
        """Print one line that stays on the screen."""

    def serving(self, upstream: Upstream) -> None:
        """The engine serves the policies here from now on."""


class _SilentPhase:
    def advance(self, share: float, note: str = "") -> None:
        """Show nothing."""


class Silent:
    """An observer that shows nothing."""

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[Phase]:
        yield _SilentPhase()

    def say(self, text: str) -> None:
        """Print nothing."""

    def serving(self, upstream: Upstream) -> None:
        """Do nothing."""


def step_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """A training step as one line: reward, sessions of real use, mean prompt and response length, seconds.

    >>> step_line(4, 40, {"reward/mean": 0.5, "seconds/rollouts": 4.9, "seconds/update": 0.1})
    'step   4/40  reward 0.500  rollouts 4.9 s  update 0.1 s'
    """
    prompt, response = metrics.get("length/prompt"), metrics.get("length/response")
    lengths = "" if prompt is None or response is None else f"{prompt:.0f} + {response:.0f} tokens  "
    sessions = ""
    if "sessions/trained" in metrics:
        sessions = f"{metrics['sessions/trained']:.0f} sessions {metrics.get('sessions/reward', math.nan):.3f}  "
    rollouts, update = metrics["seconds/rollouts"], metrics["seconds/update"]
    return (
        f"{numbered(step, steps)}  reward {metrics['reward/mean']:.3f}  {sessions}{lengths}"
        f"rollouts {rollouts:.1f} s  update {update:.1f} s"
    )


def evaluation_line(step: int, steps: int, entries: Sequence[Mapping[str, Any]]) -> str:
    """An evaluation as one line: the reward of each set and mode, seconds.

    >>> evaluation_line(20, 40, [{"set": "eval", "mode": "greedy", "reward": 0.25, "seconds": 3.0}])
    'step  20/40  eval greedy 0.250  3.0 s'
    """
    rewards = "  ".join(f"{each['set']} {each['mode']} {each['reward']:.3f}" for each in entries)
    return f"{numbered(step, steps)}  {rewards}  {sum(each['seconds'] for each in entries):.1f} s"


def numbered(step: int, steps: int) -> str:
    """How lines about a step begin."""
    return f"step {step:>3}/{steps}"


@dataclass(frozen=True)
class Summary:
    """The result of a run."""

    run_dir: Path
    seed: int
    state: RunState
    stopped_by: signal.Signals | None
    """The signal that stopped it early: Ctrl-C is SIGINT."""
    checkpoint: Path | None
    abandoned: int
    """Agents that could not be ended when their time was up."""
    problems: dict[str, int]
    """Failures of adapters."""
    server: str | None = None
    """The address of the server that has the store; None: the store is in the run's folder."""

    def rewards(self, set_name: str = HEADLINE_SET) -> dict[str, dict[str, float | None]]:
        """`{"before": {"greedy": …, "sampled": …}, "after": …}` of one held-out set; None: not evaluated (again)."""
        of_set = [e for e in self.state.evaluations if e["set"] == set_name]
        steps = sorted({e["step"] for e in of_set})

        def at(evaluated: list[int]) -> dict[str, float | None]:
            found = {e["mode"]: e["reward"] for e in of_set if e["step"] in evaluated}
            return {mode: found.get(mode) for mode in ("greedy", "sampled")}

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

    def as_json(self) -> dict[str, Any]:
        state = self.state
        return {
            "reward": self.rewards(self.headline),
            "rewards": {name: self.rewards(name) for name in self.sets},
            "steps": state.step,
            "seconds": state.seconds,
            "peak_rss_bytes": state.peak_rss_bytes,
            "rollouts": state.endings,
            "llm_calls": state.llm_calls,
            "passed_through": state.passed_through,
            "transitions": {"kept": state.kept, "dropped": state.dropped},
            "seed": self.seed,
            "interrupted": self.stopped_by is not None,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "models": [str(model) for model in self.models],
            "agents_abandoned": self.abandoned,
            "adapter_problems": self.problems,
            "evaluations": state.evaluations,
            "train_rewards": state.train_rewards,
        }

    def write(self) -> None:
        private.replace(self.file, orjson.dumps(self.as_json(), option=orjson.OPT_INDENT_2))
