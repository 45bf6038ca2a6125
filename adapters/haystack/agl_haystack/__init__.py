"""agl's adapter for Haystack."""

from agl_haystack.plugin import attach

__all__ = ["attach"]
