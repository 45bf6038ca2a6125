"""The README's snippets run as they stand, and do what it says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from agl_core.testing.scripts import CallTools, Say

README = Path(__file__).parent.parent / "README.md"


async def test_the_snippets(world: Any, attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", world.stack.url(attempt.key))
    monkeypatch.setenv("OPENAI_API_KEY", world.stack.key(attempt.key))
    world.stack.upstream.script(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    snippets = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) == 2

    def run() -> None:
        names: dict[str, Any] = {}
        with attempt.running():
            for snippet in snippets:
                exec(compile(snippet, README.name, "exec"), names)

    await asyncio.to_thread(run)
    assert await attempt.agents() == ["solver", "solver"]
    assert [(each.tool, str(each.status), each.result) for each in attempt.tool_results] == [("add", "ok", "3")]
