"""The README's snippets run as they stand, and print what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agl_core.testing.scripts import CallTools, Say, in_turn

README = Path(__file__).parent.parent / "README.md"


def test_the_snippets(
    server: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.answer = in_turn(CallTools([("add", {"a": 1, "b": 2}, "c1")]), Say("3"))
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    snippets = [text for language, text in blocks if language == "python"]
    assert len(snippets) == 3
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(compile(snippet, README.name, "exec"), names)
    assert names["result"]["messages"][-1].content == "3"
    assert capsys.readouterr().out == blocks[-1][1]
