"""The README's snippets run as they stand, and do what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agl_core.testing.readme import blocks, run_snippets
from agl_core.testing.scripts import CallTools, Say

README = Path(__file__).parent.parent / "README.md"


async def test_the_snippets(world: Any, attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_BASE", world.stack.url(attempt.key))
    monkeypatch.setenv("OPENAI_API_KEY", world.stack.key(attempt.key))
    world.stack.upstream.script(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    assert len(blocks(README, "python")) == 2

    def run() -> None:
        with attempt.running():
            run_snippets(README)

    # The snippets start an event loop of their own.
    await asyncio.to_thread(run)
    assert await attempt.agents() == ["solver", "solver"]
    assert [(each.tool, str(each.status), each.result) for each in attempt.tool_results] == [("add", "ok", "3")]
