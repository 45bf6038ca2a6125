"""What a run shows while it goes on: its phases, and a line for each step and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from agl_core.protocols import Upstream


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


def step_line(step: int, steps: int, metrics: Mapping[str, float], note: str = "") -> str:
    """A training step as one line: reward, what else there is to note, mean prompt and response length, seconds.

    >>> step_line(4, 40, {"reward/mean": 0.5, "seconds/rollouts": 4.9, "seconds/update": 0.1})
    'step   4/40  reward 0.500  rollouts 4.9 s  update 0.1 s'
    """
    prompt, response = metrics.get("length/prompt"), metrics.get("length/response")
    lengths = "" if prompt is None or response is None else f"{prompt:.0f} + {response:.0f} tokens  "
    rollouts, update = metrics["seconds/rollouts"], metrics["seconds/update"]
    return (
        f"{numbered(step, steps)}  reward {metrics['reward/mean']:.3f}  {f'{note}  ' if note else ''}{lengths}"
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
