"""Command-line agents (Claude Code, Codex, opencode, …) as agents to record, evaluate and train."""

from agl_harnesses.harness import Program as Program
from agl_harnesses.harness import ProgramHarness as ProgramHarness
from agl_harnesses.harness import ProgramOptions as ProgramOptions

__all__ = ["Program", "ProgramHarness", "ProgramOptions"]
