"""What pydantic-ai plays; `pydantic_ai_agents.py` builds it."""

from __future__ import annotations

from agl_core.testing.adapters.driver import CHAT, MESSAGES, RESPONSES, Driver, Gap, Program, Scenario, Setting


class PydanticAI(Driver):
    """No line is needed. A tool that fails raises `ModelRetry`, a handoff is an output function."""

    name = "pydantic-ai (agl-otel)"
    apis = (CHAT, RESPONSES)
    without = {MESSAGES: "`anthropic` is not among the packages of its environment."}  # noqa: RUF012
    gaps = (
        Gap("text ReAct", "pydantic-ai runs tools only for the tool calls of a model: it has no text ReAct."),
        Gap("three choices (n)", "The Responses API has no `n`.", apis=(RESPONSES,)),
    )
    packages = ("pydantic-ai-slim",)

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        from .pydantic_ai_agents import program

        return program(scenario, setting)


DRIVER = PydanticAI
"""By the name that the Makefile knows."""
