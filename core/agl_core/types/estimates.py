"""What a run asks of its engine, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """What a run asks of its engine, in rollouts of one call each."""

    steps: int
    groups: int
    """Per step."""
    group_size: int
    evaluated: int
    """Rollouts of all its evaluations together."""
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class Needs:
    """What an engine takes for a workload, by its own arithmetic: the order of magnitude."""

    memory_bytes: int
    """At most, of its process and its devices."""
    available_bytes: int
    """Of all memory that there is for it, used or free."""
    seconds: float
    """Of sampling and training, if nothing else runs on this machine and agents and tools take no time."""
