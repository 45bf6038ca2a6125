"""Writes docs/llms.txt: the pages of the site's navigation for language models, one line each with what it is for.

`python docs/make_llms.py` writes it, `--check` fails if it is not up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from generated import write_or_check

DOCS = Path(__file__).parent
OUT = DOCS / "llms.txt"
OUTSIDE = "repository/"
HEAD = """# agl

> Trains LLM agents that already exist by reinforcement learning, without a change to their code: it records their LLM
> calls through an OpenAI-compatible gateway, decides which call deserves how much of the reward, and updates the model.

Paths are relative to this file.
"""


def sections(nav: list[Any]) -> Iterator[tuple[str, list[str]]]:
    """The parts of the navigation with their pages, those of parts within parts included."""
    alone = [entry for entry in nav if isinstance(entry, str)]
    if alone:
        yield "Start", alone
    for entry in nav:
        if isinstance(entry, dict):
            for title, below in entry.items():
                pages = [each for each in below if isinstance(each, str)]
                yield title, pages
                yield from sections([each for each in below if isinstance(each, dict)])


def line(source: str, purposes: dict[str, str]) -> str:
    """A page's title, where it is, and what it is for."""
    path = f"../{source.removeprefix(OUTSIDE)}" if source.startswith(OUTSIDE) else source
    title = re.search(r"^# (.+)$", (DOCS / path).read_text(), re.M)
    if title is None or source not in purposes:
        raise SystemExit(f"{source} has no title, or no line under extra.purposes in docs/site/mkdocs.yml")
    return f"- [{title[1]}]({path}): {purposes[source]}"


def render() -> str:
    """The whole file."""
    site = yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text())
    lines = [HEAD]
    for title, pages in sections(site["nav"]):
        lines += [f"## {title}", "", *(line(page, site["extra"]["purposes"]) for page in pages), ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(OUT, render()))
