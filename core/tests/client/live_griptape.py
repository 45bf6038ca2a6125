"""Griptape's words to a model for a failed tool; no adapter sees its agents."""

from __future__ import annotations

from typing import Any

from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
from griptape.structures import Agent
from griptape.tools import BaseTool
from griptape.utils.decorators import activity
from schema import Schema

from .own_words import look_up, play


class Town(BaseTool):
    @activity(config={"description": "Look a city up.", "schema": Schema({"city": str})})
    def look(self, values: dict[str, Any]) -> str:
        return look_up(values["city"])

    @activity(config={"description": "Look a town up.", "schema": Schema({"town": str})})
    def find(self, values: dict[str, Any]) -> str:
        return look_up(values["town"])


def ask(base_url: str, key: str) -> None:
    driver = OpenAiChatPromptDriver(model="m", base_url=base_url, api_key=key)
    Agent(prompt_driver=driver, tools=[Town()]).run("Bern?")


async def test_the_text_of_an_exception_is_no_error_and_wrong_arguments_are_an_error() -> None:
    assert (await play(ask, "Town_look")).in_words == [("ok", "ok"), ("ok", "ok")]
    assert (await play(ask, "Town_find")).in_words == [("error", "griptape"), ("error", "griptape")]
