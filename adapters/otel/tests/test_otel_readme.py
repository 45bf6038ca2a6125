"""The README's snippets run as they stand, and print what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.instrumentation.openai import OpenAIInstrumentor

from agl_core.testing.readme import blocks, run_snippets
from agl_core.testing.scripts import Say
from agl_core.testing.server import running_stack

README = Path(__file__).parent.parent / "README.md"


async def test_the_snippets(
    instrument: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(blocks(README, "python")) == 2
    async with running_stack() as stack:
        monkeypatch.setenv("OPENAI_BASE_URL", stack.url(key := await stack.lease()))
        monkeypatch.setenv("OPENAI_API_KEY", stack.key(key))
        stack.upstream.script(Say("look up 1 + 2"), Say("3"))
        try:
            names = await asyncio.to_thread(run_snippets, README)
        finally:
            OpenAIInstrumentor().uninstrument()
    assert names["answer"] == "3"
    assert capsys.readouterr().out in blocks(README)
