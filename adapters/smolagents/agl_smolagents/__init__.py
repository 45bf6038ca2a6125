"""agl's adapter for smolagents."""

from agl_smolagents.plugin import attach

__all__ = ["attach"]
