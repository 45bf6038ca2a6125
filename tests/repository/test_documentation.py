"""What the documentation says is what the code does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from agl_core import kinds
from agl_core.capture import StatusRule, message_status
from agl_core.capture import status as capture_status
from agl_core.capture.status import REPORTED, WORDS
from agl_core.kinds import Component
from agl_core.plugins import Plugins
from agl_verl.plugin import NativeOptions, VerlOptions

from ..settings.settings_found import every_setting, settings_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["configuration", "cli"])
def test_generated_pages_are_up_to_date(page: str) -> None:
    command = [sys.executable, ROOT / "docs" / f"make_{page}.py", "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def _rules_of_adapters() -> list[StatusRule]:
    """Those of all adapters of this repository, installed or not, as `status_rules` orders them."""
    brought: dict[str, Component] = {}
    for file in (ROOT / "adapters").glob("*/agl_*/plugin.py"):
        plugins, module = Plugins(), types.ModuleType(file.parent.name)
        exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
        plugins.register(module, str(file))
        brought |= plugins.components(kinds.ADAPTER)
    return [rule for _, component in sorted(brought.items()) for rule in component.status_rules]


@pytest.mark.parametrize(
    ("text", "status", "rule"),
    [
        ("Error executing task with agent 'geographer'. Error: no city", "error", "crewai"),
        ("Error executing task with agent 'geographer'. Error: the request timed out", "timeout", "crewai"),
        ("Error executing tool: no answer in 5 seconds, timed out", "timeout", "crewai"),
        ("\nError executing tool. coworker mentioned not found, it must be one of …", "error", "crewai"),
        ("I encountered an error while trying to use the tool. This was the error: no city.", "error", "crewai"),
        ("Tool not found", "error", "crewai"),
        ("I encountered an error in the map", "ok", "ok"),
        ("Tool not found in the shed", "ok", "ok"),
        ("Failed to invoke Tool `look` with parameters {'timeout': 5}. Error: no city", "error", "haystack"),
        ("Failed to invoke Tool `look` with parameters {}. Error: the request timed out", "timeout", "haystack"),
        ("Failed to invoke Tool `look` with parameters {'city'", "error", "haystack"),
        ("Tool 'look' not found. Available tools: weather, status", "error", "haystack"),
        ("Tool shops open at 9", "ok", "ok"),
        ("Error executing tool 'look' with kwargs {} with error:\n no city\n", "error", "langgraph"),
        ("Error invoking tool 'look' with kwargs {'timeout': 5} with error:\n no city\n", "error", "langgraph"),
        ("Error invoking tool 'look' with kwargs {} with error:\n ReadTimeout()\n", "timeout", "langgraph"),
        ("Error executing is hard", "ok", "looks-like-error"),
        ("Tool look not found. Please select a tool that is available.", "error", "llama-index"),
        ("Tool look not found in the shed", "ok", "ok"),
        ("An error occurred while running the tool. Please try again.", "error", "openai-agents"),
        ("Tool 'look' timed out after 0.5 seconds.", "timeout", "openai-agents-timeout"),
        ("An error occurred in 1990", "ok", "ok"),
    ],
)
def test_a_frameworks_words_for_a_failure_are_known_where_only_the_conversation_tells(
    text: str, status: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Also those of frameworks that are not installed here.
    monkeypatch.setattr(capture_status, "status_rules", lambda: (*REPORTED, *_rules_of_adapters(), *WORDS))
    assert message_status(text) == (status, rule)


def test_the_architecture_page_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w./-]+(?:\.py|/))`", page)) | set(re.findall(r"`([\w./-]+\.md)`", page))
    missing = [name for name in named if not any((base / name).exists() for base in (ROOT, ROOT / "core" / "agl_core"))]

    assert len(named) > 50
    assert sorted(missing) == []


def test_messages_name_settings_that_exist() -> None:
    """Every dotted key in a text of the product, and every key that a text tells the reader to set, raise or lower."""
    keys = {
        *every_setting(Plugins.load()),
        *settings_of(VerlOptions, "engine.verl"),
        *settings_of(NativeOptions, "algorithm.verl"),
    }
    endings = {key.split(".", dots)[-1] for key in keys for dots in range(key.count(".") + 1)}
    known = [re.compile(re.escape(key).replace("NAME", r"[^.]+")) for key in _with_tables(keys)]
    sections = "|".join({key.split(".")[0] for key in keys})
    dotted = re.compile(rf"(?<![\w./@{{}}-])(?:{sections})(?:\.\w+)+")
    to_set = re.compile(r"\b(?:[Ss]et|[Rr]aise|[Ll]ower) (?:its )?([a-z]+(?:[._][a-z]+)+)\b(?!')")

    named = {
        (str(file.relative_to(ROOT)), key)
        for file in ROOT.glob("**/agl_*/**/*.py")
        if not {".venv", "tests"} & set(file.relative_to(ROOT).parts)
        for text in _texts(ast.parse(file.read_text()))
        if " " in text
        for key in (*dotted.findall(text), *to_set.findall(text))
        if not key.endswith((".py", ".log", ".toml")) and key not in VERLS_OWN
    }

    assert len(named) > 50
    assert {
        (file, key) for file, key in named if key not in endings and not any(k.fullmatch(key) for k in known)
    } == set()


VERLS_OWN = {"algorithm.adv_estimator", "actor.loss_agg_mode"}


def _with_tables(keys: Iterable[str]) -> set[str]:
    """Keys, and the tables that they are in."""
    return {".".join(key.split(".")[:end]) for key in keys for end in range(1, key.count(".") + 2)}


def _texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a module but for its docstrings; `{}` stands for what is filled in."""
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(value) for value in node.values}
            yield "".join(str(value.value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
        elif isinstance(node, ast.Expr):
            parts.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value
