"""How old experience is, in updates of the policy that answered, and what is too old to train on.

Staleness of transition t, answered by version v_t of policy p while the trainer holds version V_p:  V_p − v_t. An
episode is as old as its oldest transition, because later decisions were made in a state that the old version led to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agl_core.types import DropReason, Episode, Mode


def staleness(episode: Episode, versions: Mapping[str, int]) -> int:
    """The updates since the episode's oldest transition was sampled; `versions` are the trainer's, by policy.

    A transition whose version is not known counts as new.
    """
    ages = (versions.get(t.policy, t.version) - t.version for t in episode.transitions if t.version is not None)
    return max(ages, default=0)


def without_stale(
    groups: Sequence[Sequence[Episode]], versions: Mapping[str, int], max_staleness: int
) -> list[list[Episode]]:
    """The groups with every episode older than `max_staleness` marked as dropped; other reasons come first.

    Of rollouts that were opened from outside, their source says which are too old.

    `make_batches` removes marked episodes from their groups and compares those that are left.
    """
    return [
        [
            replace(episode, dropped=DropReason.STALE)
            if episode.dropped is None and episode.mode is not Mode.USE and staleness(episode, versions) > max_staleness
            else episode
            for episode in group
        ]
        for group in groups
    ]
