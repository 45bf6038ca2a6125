"""Command-line agents (Claude Code, Codex, opencode, …) as agents to record, evaluate and train."""

from agl_harnesses.harness import Program as Program

__all__ = ["Program"]
