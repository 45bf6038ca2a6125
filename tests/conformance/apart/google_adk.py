"""What Google ADK plays; `google_adk_agents.py` builds it."""

from __future__ import annotations

from agl_core.testing.adapters.driver import CHAT, MESSAGES, RESPONSES, Driver, Gap, Program, Scenario, Setting


class GoogleADK(Driver):
    """No line is needed. Models are LiteLLM's, experts are sub-agents of mode `single_turn`.

    A tool that fails returns a dictionary that says so.
    """

    name = "Google ADK (agl-otel)"
    apis = (CHAT,)
    without = {  # noqa: RUF012
        RESPONSES: "The tests play LiteLLM's default API.",
        MESSAGES: "The tests play LiteLLM's default API.",
    }
    gaps = (Gap("text ReAct", "ADK runs tools only for the tool calls of a model: it has no text ReAct."),)
    packages = ("google-adk", "litellm")

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        from .google_adk_agents import program

        return program(scenario, setting)


DRIVER = GoogleADK
"""By the name that the Makefile knows."""
