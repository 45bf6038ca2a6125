"""LangChain's own integration suite for chat models: ChatOpenAI through the gateway.

Not supported, by the suite's properties: images, PDFs and audio (text models), Anthropic's content blocks, and
recorded cassettes (`test_stream_time` needs them).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import openai
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from running_servers import stack_in_thread

from agl_core.testing.scripts import CallTools, Received, Say, echo


class TestChatOpenAIThroughGateway(ChatModelIntegrationTests):
    base_url: str
    api_key: str

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _serve(cls) -> Iterator[None]:
        with stack_in_thread() as (stack, portal):
            stack.upstream.answer = fitting
            key = portal.call(stack.lease)
            cls.base_url, cls.api_key = stack.url(key), stack.key(key)
            yield

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "default",
            "base_url": self.base_url,
            "api_key": self.api_key,
            "stream_usage": True,
            "max_retries": 0,
            # LangChain shares one async client between models; here each test has an event loop of its own.
            "http_async_client": openai.DefaultAsyncHttpxClient(),
        }

    @property
    def model_override_value(self) -> str:
        return "other"

    @property
    def supports_json_mode(self) -> bool:
        return True


def fitting(received: Received) -> Say | CallTools:
    """A helpful model's answer: forced or fitting tools, JSON where it is asked for, otherwise text."""
    body, last = received.body, received.items[-1]
    question = str(last.get("content"))
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or () if "function" in tool}
    choice = body.get("tool_choice") or "auto"
    if isinstance(choice, dict):
        tools = {name: tool for name, tool in tools.items() if name == choice["function"]["name"]}
    forced = choice == "required" or isinstance(choice, dict)
    if tools and (forced or (choice == "auto" and last["role"] == "user")):
        name, tool = next(iter(tools.items()))
        return CallTools([(name, example(tool.get("parameters") or {}, question))])
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_schema":
        return Say(json.dumps(example(wanted["json_schema"]["schema"], question)))
    if wanted.get("type") == "json_object":
        return Say(json.dumps(dict.fromkeys(_quoted(question), "something")))
    return echo(received)


def example(schema: Mapping[str, Any], question: str) -> Any:
    """A value that fits a JSON schema; numbers and quoted words are taken from the question."""
    match schema.get("type"):
        case "integer" | "number":
            numbers = re.findall(r"-?\d+", question)
            return int(numbers[0]) if numbers else 1
        case "object":
            return {name: example(inner, question) for name, inner in schema.get("properties", {}).items()}
    return next(iter(_quoted(question)), "something")


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']+)'", text)
