"""An agent whose tool does not return as long as a file is there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import openai

from agl_core.worker import AgentContext

HELD = "AGL_STALL_FILE"
"""The environment variable with the file's path."""


def solve(task_input: Any, context: AgentContext) -> str:
    """One tool call, and the answer."""
    messages: list[Any] = [{"role": "user", "content": f"find {task_input}"}]
    with openai.OpenAI(base_url=context.base_url, api_key=context.api_key, timeout=120) as client:
        asked = client.chat.completions.create(model="default", messages=messages).choices[0].message
        messages.append(asked.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": each.id, "content": search(task_input)} for each in asked.tool_calls or ()
        ]
        return client.chat.completions.create(model="default", messages=messages).choices[0].message.content or ""


def search(what: Any) -> str:
    """Hangs while the file is there."""
    while Path(os.environ[HELD]).exists():
        time.sleep(0.02)
    return f"{what} found"
