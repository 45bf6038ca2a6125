"""What LlamaIndex plays; `llama_index_agents.py` builds it."""

from __future__ import annotations

from agl_core.testing.adapters.driver import ATTACH, CHAT, MESSAGES, RESPONSES, Driver, Gap, Program, Scenario, Setting

HANDLER = "AglSpanHandler()"


class LlamaIndex(Driver):
    """Agents are `FunctionAgent`s, a text agent a `ReActAgent`, and a handoff an `AgentWorkflow`."""

    name = "LlamaIndex (agl-llama-index)"
    apis = (CHAT, RESPONSES)
    without = {MESSAGES: "`llama-index-llms-anthropic` is not among the packages of its environment."}  # noqa: RUF012
    forms = (ATTACH, HANDLER)
    gaps = (
        Gap(
            "structured output",
            "`output_cls` asks the model once more, after the agent's last answer: the script has no reply for it.",
        ),
        Gap("three choices (n)", "The Responses API has no `n`.", apis=(RESPONSES,)),
    )
    packages = ("llama-index-core", "llama-index-llms-openai-like")

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        from .llama_index_agents import program

        return program(scenario, setting, with_handler=setting.form == HANDLER)


DRIVER = LlamaIndex
"""By the name that the Makefile knows."""
