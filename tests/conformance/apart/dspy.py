"""What DSPy plays; `dspy_agents.py` builds it."""

from __future__ import annotations

from agl_core.testing.adapters.driver import ATTACH, CHAT, MESSAGES, RESPONSES, Driver, Gap, Program, Scenario, Setting

ONE_LINE = "agl_dspy.attach()"


class DSPy(Driver):
    """Agents are predictors of a module of the user's own, which runs their tools; a DSPy adapter of the user's own
    sends the conversation as it is."""

    name = "DSPy (agl-dspy)"
    apis = (CHAT,)
    without = {  # noqa: RUF012
        RESPONSES: "The tests play DSPy's default API.",
        MESSAGES: "The tests play DSPy's default API.",
    }
    streaming = (False,)
    forms = (ATTACH, ONE_LINE)
    gaps = (
        Gap("handoff", "DSPy has no handoff: the user's own code decides which module is next."),
        Gap("three choices (n)", "DSPy asks for n replies by n requests, and each is a call."),
        Gap("lost replies, retried", "DSPy's client does not number its retries: the lost reply counts as a call."),
    )
    packages = ("dspy",)

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        from .dspy_agents import program

        return program(scenario, setting, with_line=setting.form == ONE_LINE)


DRIVER = DSPy
"""By the name that the Makefile knows."""
