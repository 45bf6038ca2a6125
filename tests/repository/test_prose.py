"""Sentences begin with their subject: none has one of five openings, which make a reader wait for it.

Counted are tracked Markdown pages, and docstrings of the product. Questions, headings and code are not.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = re.compile(r"(core|server|adapters|algorithms|rewards|apps)/(?!.*tests/).*\.py")
OPENING = re.compile(r"(?:Of|What|Where|Those|That)\b")


def openings() -> Iterator[tuple[str, str]]:
    for path in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split():
        if path.endswith(".md"):
            texts = [re.sub(r"(?ms)^ *```.*?^ *```$|^#.*?$|<!--.*?-->", "\n\n", (ROOT / path).read_text())]
        elif PRODUCT.fullmatch(path):
            texts = _docstrings(ast.parse((ROOT / path).read_text()))
        else:
            continue
        yield from ((path, sentence) for text in texts for sentence in _sentences(text) if OPENING.match(sentence))


def _docstrings(tree: ast.Module) -> list[str]:
    expressions = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return [str(value.value) for value in expressions if isinstance(value, ast.Constant)]


def _sentences(text: str) -> Iterator[str]:
    """Sentences that end: a cell or a heading without a full stop is no sentence."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) )|\|", text):
        line = re.sub("`[^`]*`", "`code`", " ".join(paragraph.split()))
        for sentence in re.split(r"(?<=[.!?])[\"')*]*\s+", line):
            bare = re.sub(r"^(?:[-*>]|\d+\.)? ?[*_(\[\"']*", "", sentence)
            if re.search(r"[.:!][*)\"']*$", bare):
                yield bare


def test_sentences_begin_with_their_subject() -> None:
    assert list(openings()) == [], "Put the subject first."


if __name__ == "__main__":
    for path, sentence in openings():
        print(f"{path}: {sentence}")
