"""agl's adapter for DSPy."""

from agl_dspy.plugin import attach

__all__ = ["attach"]
