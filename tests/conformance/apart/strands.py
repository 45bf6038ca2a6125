"""What Strands plays; `strands_agents.py` builds it."""

from __future__ import annotations

from agl_core.testing.adapters.driver import CHAT, MESSAGES, RESPONSES, Driver, Gap, Program, Scenario, Setting


class Strands(Driver):
    """No line is needed. Experts are agents in a tool.

    Strands' agents keep their conversation: each rollout has agents of its own.
    """

    name = "Strands (agl-otel)"
    apis = (CHAT,)
    without = {  # noqa: RUF012
        RESPONSES: "The tests play Strands' default API of OpenAI.",
        MESSAGES: "`anthropic` is not among the packages of its environment.",
    }
    gaps = (
        Gap("handoff", "Strands' `Swarm` hands over by one tool of its own, and the scenario's tool is another one."),
        Gap("text ReAct", "Strands runs tools only for the tool calls of a model: it has no text ReAct."),
    )
    packages = ("strands-agents",)

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        from .strands_agents import program

        return program(scenario, setting)


DRIVER = Strands
"""By the name that the Makefile knows."""
