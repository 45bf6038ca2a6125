"""No framework and no adapter: what is told is told with agl's own functions, or with headers alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import agl_core
from agl_core.wire.headers import HEADER_AGENT

from ..driver import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Driver,
    Gap,
    InexpressibleError,
    Program,
    Question,
    Scenario,
    Setting,
)
from .conversations import client_of
from .handmade import NO_CHOICES, Loop, Reporter

HEADERS = "headers, no agl in the process"


class Functions(Reporter):
    """`agl_core.agent` around an agent, `agl_core.tool` around its tools."""

    def speaking(self, agent: str) -> AbstractContextManager[Any]:
        return agl_core.agent(agent)

    @contextlib.contextmanager
    def using(self, tool: str, arguments: Mapping[str, Any], id: str | None) -> Iterator[Callable[[str], None]]:
        with agl_core.tool(tool, call_id=id, arguments=dict(arguments)) as run:
            yield lambda result: setattr(run, "result", result)


class _Headers(Reporter):
    """A header names the agent; the conversation tells what the tools did."""

    def headers(self, agent: str) -> Mapping[str, str]:
        return {HEADER_AGENT: agent}

    def speaking(self, agent: str) -> AbstractContextManager[Any]:
        return nullcontext()


class ByHand(Driver):
    """A loop around the vendor's client, with `agl_core.agent` and `agl_core.tool` around agents and tools."""

    name = "no framework, the clients of OpenAI and Anthropic (agl-core)"
    apis = (CHAT, RESPONSES, MESSAGES)
    gaps = (NO_CHOICES,)

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        loop = Loop(Functions(), client_of(setting, setting.root, setting.api_key), setting, scenario)

        async def program(question: Question) -> None:
            await loop.run(question.text)

        return program


class ByHeaders(Driver):
    """The same with nothing of agl in the process, as in any other language: the attempt's URL, and a header."""

    name = "any language, by headers"
    apis = (CHAT, RESPONSES, MESSAGES)
    forms = (HEADERS,)
    streaming = (False,)
    gaps = (
        NO_CHOICES,
        Gap("text ReAct", "Without tool call ids, the conversation does not show what a tool did; spans do."),
    )

    @contextlib.contextmanager
    def attached(self, form: str) -> Iterator[None]:
        yield

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        if scenario.react:
            raise InexpressibleError

        async def program(question: Question) -> None:
            client = client_of(setting, question.root, question.api_key)
            await Loop(_Headers(), client, setting, scenario).run(question.text)

        return program
