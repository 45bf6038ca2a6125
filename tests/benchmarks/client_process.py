"""An agent's process that is measured: `python client_process.py KIND CORE…`, with the model server in its environment.

For each number that it reads, it makes so many calls, one after the other, and prints their seconds as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from server_cores import pin
from server_load import chat

PROMPT = "You are an agent that plans journeys. Use the timetable, and answer briefly."
QUESTION = "When does my train leave, and can I still take it?"


def openai_client() -> Callable[[], Any]:
    """A request of OpenAI's client, with the conversation of an agent's sixth turn."""
    import openai

    client, request = openai.OpenAI(), chat(5, "0")
    return lambda: client.chat.completions.create(**request)


def langchain_agent() -> Callable[[], Any]:
    """A run of a LangChain agent, which makes one call."""
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def timetable(station: str) -> str:
        """The departures of a station."""
        return f"{station}: 09:30 platform 4"

    agent = create_agent(ChatOpenAI(model="default"), [timetable], system_prompt=PROMPT, name="planner")
    return lambda: agent.invoke({"messages": [("user", QUESTION)]})


KINDS: Mapping[str, Callable[[], Callable[[], Any]]] = {
    "OpenAI's client": openai_client,
    "a LangChain agent": langchain_agent,
}


def main() -> None:
    kind, *core = sys.argv[1:]
    pin(core)
    call = KINDS[kind]()
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
