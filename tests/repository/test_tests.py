"""How the tests find what they share (the docstring of the root's conftest.py says it)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("adapters", "algorithms", "apps", "core", "deploy", "examples", "rewards", "tests")
CHANGE = re.compile(r"sys\.path(\.(append|insert|extend)\(| ?\+=|\[[^\]]*\] ?= ?\[)")
"""What adds to it; what a test restores of it is a slice set to a name."""


def test_no_test_adds_to_the_path_of_modules() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in _files()
        if file != Path(__file__)
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if CHANGE.search(line)
    ]

    assert found == []


def test_no_test_reaches_into_the_tests_of_another_package() -> None:
    """Neither by a path nor by an import."""
    found = []
    for file in _files():
        others = {str(each.relative_to(ROOT)) for each in _trees()} - {str(_tree(file).relative_to(ROOT))}
        depth = len(file.relative_to(_tree(file)).parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level > depth:
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}: {'.' * node.level}{node.module or ''}")
            if isinstance(node, ast.BinOp) and (place := _joined(node)) and any(each in place for each in others):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}: {place}")

    assert found == []


def _files() -> Iterator[Path]:
    """All files of all tests."""
    return (file for tree in _trees() for file in sorted(tree.rglob("*.py")))


def _trees() -> list[Path]:
    """The folders `tests`: one for each package, and the root's."""
    return sorted(
        tree
        for folder in FOLDERS
        for tree in (ROOT / folder, *(ROOT / folder).rglob("tests"))
        if tree.name == "tests" and tree.is_dir() and not (tree / "__init__.py").exists()
    )


def _tree(file: Path) -> Path:
    """The nearest of them."""
    return next(parent for parent in file.parents if parent.name == "tests")


def _joined(node: ast.BinOp) -> str:
    """`core/tests/server` of `ROOT / "core" / "tests" / "server"`."""
    parts: list[str] = []
    left: ast.expr = node
    while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Div):
        if isinstance(left.right, ast.Constant) and isinstance(left.right.value, str):
            parts.insert(0, left.right.value)
        left = left.left
    return "/".join(parts)
