"""An agent that notes, in a file that survives its own death, what it began and what was acknowledged to it."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import openai

from agl_core.client.agent import AgentContext

NOTES = "AGL_FAULTS_NOTES"
"""The environment variable with the file's path."""
RETRIES = "AGL_FAULTS_RETRIES"
"""How often the LLM client tries a request again by itself."""
TURNS = 3

_PAUSE = 0.05
_TIMEOUT = 20.0


def solve(task_input: Any, context: AgentContext) -> str:
    """Some calls, none like another, of which each reply is noted before the next call."""
    attempt = {"rollout": context.rollout, "attempt": context.attempt, "pid": os.getpid()}
    _note({"begun": attempt})
    text = ""
    with openai.OpenAI(
        base_url=context.base_url,
        api_key=context.api_key,
        timeout=_TIMEOUT,
        max_retries=int(os.environ.get(RETRIES, "3")),
    ) as client:
        for turn in range(TURNS):
            prompt = f"{context.rollout} {context.attempt} {turn} {os.urandom(8).hex()}"
            messages: list[Any] = [{"role": "user", "content": prompt}]
            try:
                reply = client.chat.completions.create(model="default", messages=messages)
            except openai.OpenAIError as error:
                _note({"failed": {**attempt, "turn": turn, "error": type(error).__name__}})
                raise
            text = reply.choices[0].message.content or ""
            _note({"acknowledged": {**attempt, "turn": turn, "call": reply.id, "messages": messages, "content": text}})
            time.sleep(_PAUSE)
    return text


def _note(entry: dict[str, Any]) -> None:
    file = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(entry).encode() + b"\n")
        os.fsync(file)
    finally:
        os.close(file)
