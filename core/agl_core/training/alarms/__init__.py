"""Alarms: what a person should know of a run, with why it matters and what to do.

An alarm is a function of its name, which returns what it saw, or None. Its docstring, which docs/health.md shows, has
three paragraphs: when the alarm is raised, why that matters, and what to do. `steps` has the alarms on the numbers of
the steps, `rollouts` those on the rollouts of a step, and `stall` that on a run in which nothing goes on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from agl_core.types import AlarmName

Check: TypeAlias = Callable[..., Any]
"""The function of an alarm."""


@dataclass(frozen=True)
class Alarm:
    """An alarm that was raised; `metrics.jsonl` has it in the line of its step."""

    name: AlarmName
    seen: str
    """What was seen, with its numbers."""
    why: str
    """Why it matters."""
    remedy: str
    """What to do."""
    details: str = ""
    """More of what was seen, in lines of its own: the first error, for example."""

    @classmethod
    def of(cls, check: Check, seen: str, *, remedy: str = "", details: str = "") -> Alarm:
        """The alarm of this function; `remedy` is for a cause that is known more exactly."""
        _, why, general_remedy = paragraphs(check)
        return cls(AlarmName(check.__name__), seen, why, remedy or general_remedy, details)

    @property
    def text(self) -> str:
        sentences = " ".join(part for part in (f"{self.seen}.", self.why, self.remedy, self.details) if part)
        return f"alarm {self.name}: {sentences}"


def paragraphs(check: Check) -> tuple[str, str, str]:
    """When an alarm is raised, why that matters, and what to do; without its docstring (`python -OO`), nothing."""
    when, _, rest = (inspect.getdoc(check) or "").replace("\n\n", "\0").replace("\n", " ").partition("\0")
    why, _, remedy = rest.partition("\0")
    return when, why, remedy
