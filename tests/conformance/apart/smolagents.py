"""What smolagents plays; `smolagents_agents.py` builds it."""

from __future__ import annotations

from agl_core.testing.adapters.driver import ATTACH, CHAT, MESSAGES, RESPONSES, Driver, Gap, Program, Scenario, Setting

ONE_LINE = "agl_smolagents.attach()"


class Smolagents(Driver):
    """Agents are `ToolCallingAgent`s, experts are managed agents. A model of its own takes plain text for an answer.

    smolagents' agents keep their conversation: rollouts share the model, and each has agents of its own.
    """

    name = "smolagents (agl-smolagents)"
    apis = (CHAT,)
    without = {  # noqa: RUF012
        RESPONSES: "smolagents' models do not speak it.",
        MESSAGES: "smolagents' models speak it only through LiteLLM.",
    }
    forms = (ATTACH, ONE_LINE)
    gaps = (Gap("handoff", "smolagents has no handoff: a managed agent returns to the one that called it."),)
    packages = ("smolagents",)

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        from .smolagents_agents import program

        return program(scenario, setting, with_line=setting.form == ONE_LINE)


DRIVER = Smolagents
"""By the name that the Makefile knows."""
