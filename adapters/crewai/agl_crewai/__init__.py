"""agl's adapter for CrewAI."""

from agl_crewai.plugin import attach

__all__ = ["attach"]
