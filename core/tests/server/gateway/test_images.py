"""Images in messages: they may be large, go to the model server as they are, and are stored once."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from agl_core.store.sqlite import SqliteStore
from agl_core.testing.server import running_stack

MEGABYTE = 1 << 20
TURNS = 10


def image(seed: int = 0, size: int = MEGABYTE) -> str:
    """Base64 of bytes that cannot be compressed."""
    return base64.b64encode(random.Random(seed).randbytes(size)).decode()


async def chat(client: openai.AsyncOpenAI, texts: list[str], data: str) -> None:
    """The image stands beside the first words, and is repeated with each later turn."""
    shown: Any = [{"type": "text", "text": texts[0]}, {"type": "image_url", "image_url": {"url": data}}]
    later: Any = [{"role": "user", "content": text} for text in texts[1:]]
    await client.chat.completions.create(model="default", messages=[{"role": "user", "content": shown}, *later])


async def responses(client: openai.AsyncOpenAI, texts: list[str], data: str) -> None:
    shown: Any = [{"type": "input_text", "text": texts[0]}, {"type": "input_image", "image_url": data}]
    later: Any = [{"role": "user", "content": text} for text in texts[1:]]
    await client.responses.create(model="default", input=[{"role": "user", "content": shown}, *later])


async def messages(client: openai.AsyncOpenAI, texts: list[str], data: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": data.partition(",")[2]}
    shown: Any = [{"type": "text", "text": texts[0]}, {"type": "image", "source": source}]
    later: Any = [{"role": "user", "content": text} for text in texts[1:]]
    base = str(client.base_url).rstrip("/").removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base, api_key=client.api_key, max_retries=0) as own:
        await own.messages.create(model="default", max_tokens=9, messages=[{"role": "user", "content": shown}, *later])


@pytest.mark.parametrize("ask", [chat, responses, messages], ids=lambda ask: ask.__name__)
async def test_a_conversation_with_an_image_stores_it_once(tmp_path: Path, ask: Any) -> None:
    """Ten turns with one image of 1 MB, of which every request has the whole (1.4 MB as base64)."""
    path, data = tmp_path / "store.sqlite", f"data:image/png;base64,{image()}"
    async with SqliteStore(path) as store, running_stack(store=store) as stack:
        stack.upstream.returns_ids = False
        key = await stack.lease()
        texts: list[str] = []
        for turn in range(TURNS):
            texts.append(f"turn {turn}")
            await ask(stack.client(key, timeout=60), texts, data)
        calls = await store.calls([key])
        assert [call.request["messages"] for call in calls] == [
            received.body["messages"] for received in stack.upstream.received
        ]
        assert sum(data in json.dumps(call.request) for call in calls) == TURNS
    assert size_of(tmp_path) < 1.5 * len(data)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
