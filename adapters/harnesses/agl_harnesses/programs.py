"""The command-line agents that are known by name, as they run without a person. Versions stand in docs/harnesses.md."""

from __future__ import annotations

from agl_harnesses.harness import Program

PROGRAMS: tuple[Program, ...] = (
    Program(
        name="mini-swe-agent",
        command=("mini", "-m", "openai/{model}", "{arguments}", "-y", "--exit-immediately", "-t", "{prompt}"),
        install="pipx install mini-swe-agent",
        variables={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
    ),
)
