"""The README's snippets run as they stand, and print what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from langchain_core.tracers import context as langchain_context

import agl_langchain

README = Path(__file__).parent.parent / "README.md"


def test_the_snippets(
    server: Any,
    ask: Any,
    answer: Any,
    in_turn: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(langchain_context, "_configure_hooks", list(langchain_context._configure_hooks))
    server.script = in_turn(ask(("c1", "add", {"a": 1, "b": 2})), answer("3"))
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    snippets = [text for language, text in blocks if language == "python"]
    assert len(snippets) == 3
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(compile(snippet, README.name, "exec"), names)
    agl_langchain.attach.cache_clear()
    assert names["result"]["messages"][-1].content == "3"
    assert capsys.readouterr().out == blocks[-1][1]
