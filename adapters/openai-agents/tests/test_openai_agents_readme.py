"""The README's snippets run as they stand, and print what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agl_core.testing.readme import blocks, run_snippets
from agl_core.testing.scripts import CallTools, Say, in_turn

README = Path(__file__).parent.parent / "README.md"


def test_the_snippets(use: str, detached: None, server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = in_turn(CallTools([("add", {"a": 1, "b": 2}, "c1")]), Say("3"))
    assert len(blocks(README, "python")) == 3
    names = run_snippets(README)
    assert names["result"].final_output == "3"
    assert capsys.readouterr().out == blocks(README)[-1]
