"""agno's agents are seen without a line if OpenInference's instrumentor is installed; its bare texts are no errors."""

from __future__ import annotations

import anthropic
import pytest

from .own_words import Seen, look_up, play  # isort: skip

from agno.agent import Agent
from agno.models.anthropic import Claude
from agno.models.openai import OpenAIChat

from agl_core.client.agent import agent_environment, client_variables


def ask(base_url: str, key: str) -> None:
    model = OpenAIChat(id="m", base_url=base_url, api_key=key)
    Agent(name="solver", model=model, tools=[look_up], telemetry=False).run("Bern?")


async def test_an_unmodified_agent() -> None:
    assert await play(ask) == Seen(["solver", "solver"], ["error", "ok"], [("ok", "ok"), ("ok", "ok")])


def test_it_makes_anthropics_client_of_the_variables_that_agl_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the user's own")
    with agent_environment(client_variables("http://127.0.0.1:9")):
        client = Claude(id="m").get_client()
    assert isinstance(client, anthropic.Anthropic)
    assert (client.api_key, client.auth_token) == ("agl", None)
