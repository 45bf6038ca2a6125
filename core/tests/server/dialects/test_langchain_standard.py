"""LangChain's own integration suite for chat models: ChatOpenAI through the gateway.

Not supported, by the suite's properties: images, PDFs and audio (text models), Anthropic's content blocks, and
recorded cassettes (`test_stream_time` needs them).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from running_servers import stack_in_thread


class TestChatOpenAIThroughGateway(ChatModelIntegrationTests):
    base_url: str
    api_key: str

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _serve(cls) -> Iterator[None]:
        with stack_in_thread() as (stack, portal):
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
