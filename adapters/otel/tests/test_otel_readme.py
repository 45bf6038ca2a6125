"""The README's snippets run as they stand, and print what it says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.instrumentation.openai import OpenAIInstrumentor

from agl_core.testing.scripts import Say
from agl_core.testing.server import running_stack

README = Path(__file__).parent.parent / "README.md"


async def test_the_snippets(
    instrument: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    snippets = [text for language, text in blocks if language == "python"]
    assert len(snippets) == 2
    names: dict[str, Any] = {}

    def run() -> None:
        for snippet in snippets:
            exec(compile(snippet, README.name, "exec"), names)

    async with running_stack() as stack:
        monkeypatch.setenv("OPENAI_BASE_URL", stack.url(key := await stack.lease()))
        monkeypatch.setenv("OPENAI_API_KEY", stack.key(key))
        stack.upstream.script(Say("look up 1 + 2"), Say("3"))
        try:
            await asyncio.to_thread(run)
        finally:
            OpenAIInstrumentor().uninstrument()
    assert names["answer"] == "3"
    printed = [text for language, text in blocks if not language]
    assert capsys.readouterr().out in printed
