"""The drivers of frameworks whose pins do not go together: each plays in an environment of its own.

`make test-frameworks` makes these environments. This module imports no framework: here a driver says what it plays, for
the page. The modules beside it build the agents, and name their driver `DRIVER`, as the Makefile knows it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Iterator
from unittest import mock

from ...support.testing_aids import NO_TELEMETRY, only_this_machine
from ..driver import CHAT, RESPONSES, Driver, Gap, Program, Scenario, Setting

# Before the module beside a driver imports its framework.
os.environ.update(NO_TELEMETRY)

LATE = Gap("given up", "Its call goes on in a thread or a task: the client of a cancelled agent still gets the reply.")


class Apart(Driver):
    """Its agents are the `Cast` of the module that it names, which imports the framework."""

    module: str

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        program: Program = importlib.import_module(f".{self.module}", __package__).Cast(scenario, setting).program()
        return program


class LlamaIndex(Apart):
    """Agents are `FunctionAgent`s, a text agent a `ReActAgent`, and a handoff an `AgentWorkflow`."""

    module = "llama_index"
    name = "LlamaIndex (agl-llama-index)"
    apis = (CHAT, RESPONSES)
    gaps = (
        Gap(
            "structured output",
            "`output_cls` asks the model once more, after the agent's last answer: the script has no reply for it.",
        ),
        Gap("three choices (n)", "The Responses API has no `n`.", apis=(RESPONSES,)),
        LATE,
    )


class Haystack(Apart):
    """Agents are `Agent`s, each in a pipeline that names it, or a tool of another one."""

    module = "haystack"
    name = "Haystack (agl-haystack)"
    apis = (CHAT, RESPONSES)
    gaps = (
        Gap("text ReAct", "Haystack runs tools only for the tool calls of a model: it has no text ReAct."),
        Gap("three choices (n)", "`OpenAIChatGenerator` refuses `n` when it streams.", apis=(CHAT,), streaming=(True,)),
        Gap("three choices (n)", "The Responses API has no `n`.", apis=(RESPONSES,)),
    )


class CrewAI(Apart):
    """Each agent has a crew of one task. Experts are tools that start a crew of their own.

    CrewAI's agents and tasks keep what they did: rollouts share the LLMs, and each has crews of its own.
    """

    module = "crewai"
    name = "CrewAI (agl-crewai)"
    apis = (CHAT,)
    gaps = (
        Gap("handoff", "CrewAI has no handoff: delegated work returns to the agent that delegated it."),
        Gap("text ReAct", "CrewAI has a text format of its own, which is tested apart."),
        LATE,
    )

    @contextlib.contextmanager
    def attached(self, form: str) -> Iterator[None]:
        """Meanwhile nothing leaves the machine, and what CrewAI stores is not in the user's home."""
        with (
            only_this_machine(),
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            mock.patch.dict(os.environ, CREWAI_STORAGE_DIR=folder),
            super().attached(form),
        ):
            yield


class Smolagents(Apart):
    """Agents are `ToolCallingAgent`s, experts are managed agents. A model of its own takes plain text for an answer.

    smolagents' agents keep their conversation: rollouts share the model, and each has agents of its own.
    """

    module = "smolagents"
    name = "smolagents (agl-smolagents)"
    apis = (CHAT,)
    gaps = (Gap("handoff", "smolagents has no handoff: a managed agent returns to the one that called it."), LATE)


class DSPy(Apart):
    """Agents are predictors of a module of the user's own, which runs their tools; a DSPy adapter of the user's own
    sends the conversation as it is."""

    module = "dspy"
    name = "DSPy (agl-dspy)"
    apis = (CHAT,)
    gaps = (
        Gap("handoff", "DSPy has no handoff: the user's own code decides which module is next."),
        Gap("three choices (n)", "DSPy asks for n replies by n requests, and each is a call."),
        Gap("lost replies, retried", "DSPy's client does not number its retries: the lost reply counts as a call."),
    )


class PydanticAI(Apart):
    """No line is needed. A tool that fails raises `ModelRetry`, a handoff is an output function."""

    module = "pydantic_ai"
    name = "pydantic-ai (agl-otel)"
    apis = (CHAT, RESPONSES)
    gaps = (
        Gap("text ReAct", "pydantic-ai runs tools only for the tool calls of a model: it has no text ReAct."),
        Gap("three choices (n)", "The Responses API has no `n`.", apis=(RESPONSES,)),
    )


class Strands(Apart):
    """No line is needed. Experts are agents in a tool.

    Strands' agents keep their conversation: each rollout has agents of its own.
    """

    module = "strands"
    name = "Strands (agl-otel)"
    apis = (CHAT,)
    gaps = (
        Gap("handoff", "Strands' `Swarm` hands over by one tool of its own, and the scenario's tool is another one."),
        Gap("text ReAct", "Strands runs tools only for the tool calls of a model: it has no text ReAct."),
    )


class GoogleADK(Apart):
    """No line is needed. Models are LiteLLM's, experts are sub-agents of mode `single_turn`.

    A tool that fails returns a dictionary that says so.
    """

    module = "google_adk"
    name = "Google ADK (agl-otel)"
    apis = (CHAT,)
    gaps = (Gap("text ReAct", "ADK runs tools only for the tool calls of a model: it has no text ReAct."),)


APART = (LlamaIndex(), Haystack(), CrewAI(), Smolagents(), DSPy(), PydanticAI(), Strands(), GoogleADK())
