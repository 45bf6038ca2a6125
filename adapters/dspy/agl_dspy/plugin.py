"""What this package registers, and attaching without code."""

from __future__ import annotations

import agl_core


@agl_core.adapter("dspy")
def dspy() -> None:
    """DSPy: the names of modules, and the results of tools. In a rollout, DSPy's cache is off."""
    from agl_dspy.programs import watch

    watch()


def attach() -> None:
    """See every DSPy program of this process, with no change to its code; again changes nothing.

    agl's workers do it by themselves. Outside any rollout it does nothing.
    """
    agl_core.attach([dspy])
