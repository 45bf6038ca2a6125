"""Which versions the learner's weights come from, and how many updates ago.

Steps count on when the weights go back to an earlier version. With a reset after step 50 to 40, the weights of step 53
are those of step 40 after 3 updates, and come from none of the steps 41 to 50:

    … ── 39 ── 40 ── 41 ── … ── 50
                └─────────────────── 51 ── 52 ── 53
"""

from __future__ import annotations

from collections.abc import Sequence


def updates_since(version: int, step: int, resets: Sequence[Sequence[int]]) -> int | None:
    """The updates from a version to the learner's weights after `step`; None if they do not come from it.

    Each of `resets` is a pair: the step after which the weights went back, and the version that they went back to.

    >>> resets = [(50, 40)]
    >>> updates_since(38, 53, resets), updates_since(45, 53, resets), updates_since(51, 53, resets)
    (5, None, 2)
    >>> updates_since(50, 50, resets), updates_since(40, 50, resets)
    (None, 0)
    """
    passed, end, is_version = 0, step, False
    for after, to in reversed(resets):
        # A version was saved before the weights went back after its step.
        if after < end or (after == end and not is_version):
            if after < version <= end:
                return passed + end - version
            passed, end, is_version = passed + end - after, to, True
    return passed + end - version if version <= end else None
