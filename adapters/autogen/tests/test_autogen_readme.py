"""The README's snippets run as they stand, and print what it says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from agl_core.testing.scripts import CallTools, Say

README = Path(__file__).parent.parent / "README.md"


async def test_the_snippets(
    world: Any, trial: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", world.stack.url(trial.key))
    monkeypatch.setenv("OPENAI_API_KEY", world.stack.key(trial.key))
    world.upstream.script(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    snippets = [text for language, text in blocks if language == "python"]
    assert len(snippets) == 2

    def run() -> None:
        names: dict[str, Any] = {}
        for snippet in snippets:
            exec(compile(snippet, README.name, "exec"), names)

    # The snippets start an event loop of their own.
    await asyncio.to_thread(run)
    assert capsys.readouterr().out == blocks[-1][1]
