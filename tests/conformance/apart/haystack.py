"""What Haystack plays; `haystack_agents.py` builds it."""

from __future__ import annotations

from agl_core.testing.adapters.driver import ATTACH, CHAT, MESSAGES, RESPONSES, Driver, Gap, Program, Scenario, Setting

ONE_LINE = "agl_haystack.attach()"


class Haystack(Driver):
    """Agents are `Agent`s, each in a pipeline that names it, or a tool of another one."""

    name = "Haystack (agl-haystack)"
    apis = (CHAT, RESPONSES)
    without = {MESSAGES: "`anthropic-haystack` is not among the packages of its environment."}  # noqa: RUF012
    forms = (ATTACH, ONE_LINE)
    gaps = (
        Gap("text ReAct", "Haystack runs tools only for the tool calls of a model: it has no text ReAct."),
        Gap("three choices (n)", "`OpenAIChatGenerator` refuses `n` when it streams.", apis=(CHAT,), streaming=(True,)),
        Gap("three choices (n)", "The Responses API has no `n`.", apis=(RESPONSES,)),
    )
    packages = ("haystack-ai",)

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        from .haystack_agents import program

        return program(scenario, setting, with_line=setting.form == ONE_LINE)


DRIVER = Haystack
"""By the name that the Makefile knows."""
