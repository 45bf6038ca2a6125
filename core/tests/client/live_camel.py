"""CAMEL's words to a model for a failed tool; no adapter sees its agents."""

from __future__ import annotations

from typing import Any

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter

from .own_words import look_up, play


class Counter(BaseTokenCounter):
    """Its own one is downloaded."""

    def count_tokens_from_messages(self, messages: Any) -> int:
        return 1

    def encode(self, text: str) -> list[int]:
        return [1]

    def decode(self, token_ids: list[int]) -> str:
        return ""


def ask(base_url: str, key: str) -> None:
    platform = ModelPlatformType.OPENAI_COMPATIBLE_MODEL
    model = ModelFactory.create(platform, "m", url=base_url, api_key=key, token_counter=Counter())
    ChatAgent("You know towns.", model=model, tools=[FunctionTool(look_up)]).step("Bern?")


async def test_its_words_for_a_failed_tool() -> None:
    assert (await play(ask)).in_words == [("error", "camel"), ("ok", "ok")]
