"""The result of a run (`summary.json`)."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agl_core import private
from agl_core.training.checkpoints import HEADLINE_SET, RunState, model_links
from agl_core.types import Json

SUMMARY_FILE = "summary.json"


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

    def as_json(self, verdict: Mapping[str, Json] | None = None) -> dict[str, Any]:
        state = self.state
        return {
            "verdict": verdict,
            "reward": self.rewards(self.headline),
            "rewards": {name: self.rewards(name) for name in self.sets},
            "steps": state.step,
            "seconds": state.seconds,
            "peak_rss_bytes": state.peak_rss_bytes,
            "rollouts": state.endings,
            "llm_calls": state.llm_calls,
            "passed_through": state.passed_through,
            "transitions": {
                "kept": state.kept,
                "without_advantage": state.without_advantage,
                "dropped": state.dropped,
            },
            "seed": self.seed,
            "interrupted": self.stopped_by is not None,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "models": [str(model) for model in self.models],
            "agents_abandoned": self.abandoned,
            "adapter_problems": self.problems,
            "evaluations": state.evaluations,
            "train_rewards": state.train_rewards,
        }

    def write(self, verdict: Mapping[str, Json] | None = None) -> None:
        """Write the file, with what the run came to (`agl_core.analysis.health.verdict_of`)."""
        private.replace(self.file, orjson.dumps(self.as_json(verdict), option=orjson.OPT_INDENT_2))
