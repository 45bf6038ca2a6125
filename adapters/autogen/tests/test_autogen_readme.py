"""The README's snippets run as they stand, and print what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agl_core.testing.readme import blocks, run_snippets
from agl_core.testing.scripts import CallTools, Say

README = Path(__file__).parent.parent / "README.md"


async def test_the_snippets(
    world: Any, trial: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", world.stack.url(trial.key))
    monkeypatch.setenv("OPENAI_API_KEY", world.stack.key(trial.key))
    world.upstream.script(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    assert len(blocks(README, "python")) == 2
    # The snippets start an event loop of their own.
    await asyncio.to_thread(run_snippets, README)
    assert capsys.readouterr().out == blocks(README)[-1]
