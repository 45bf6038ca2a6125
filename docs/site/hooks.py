"""Additions to MkDocs: pages from outside docs/, and links that lead there.

In the repository a link is relative to its file (`../core/README.md`). In the site, a README is the page of the same
path below `repository/`. Other files that a page links to (a configuration, a picture) are copied there.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[2]
DOCS = "docs/"
OUTSIDE = "repository/"

_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
_LINK = re.compile(r"\[([^][]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Headings get the anchors that GitHub gives them, so that links work in both places."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the READMEs that the navigation names."""
    for source in _pages(config.nav):
        if source.startswith(OUTSIDE):
            _add(files, config, source.removeprefix(OUTSIDE))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a page to where their targets are in the site."""
    source = page.file.src_uri
    here = source.removeprefix(OUTSIDE) if source.startswith(OUTSIDE) else DOCS + source

    def led(match: re.Match[str]) -> str:
        words, link, anchor = match[1], match[2], match[3] or ""
        if ":" in link:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link))
        if (ROOT / target).is_dir():
            target += "/README.md"
            if not (ROOT / target).is_file() and target != f"{DOCS}README.md":
                return words  # A folder that has no page.
        if target == f"{DOCS}README.md":
            target = f"{DOCS}index.md"
        if target.startswith("..") or not (ROOT / target).is_file():
            return match[0]  # MkDocs warns of it.
        if target.startswith(DOCS):
            there = target.removeprefix(DOCS)
        else:
            there = OUTSIDE + target
            if files.get_file_from_path(there) is None:
                _add(files, config, target)
        return f"[{words}]({posixpath.relpath(there, posixpath.dirname(source) or '.')}{anchor})"

    return "".join(text if is_code else _LINK.sub(led, text) for is_code, text in _parts(with_wide_lists(markdown)))


def _parts(markdown: str) -> Iterator[tuple[bool, str]]:
    """Fenced blocks, and the text between them, in which a link may go on in the next line."""
    fence, text = "", ""
    for line in markdown.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if mark and not fence:
            yield False, text
            fence, text = mark[1], ""
        text += line
        if mark and len(text) > len(line) and mark[1].startswith(fence):
            yield True, text
            fence, text = "", ""
    yield bool(fence), text


def with_wide_lists(markdown: str) -> str:
    """Lists as Python-Markdown reads them: an empty line before them, and four spaces for what belongs to an item.

    >>> print(with_wide_lists("Two:\\n- one\\n  more\\n- two"))
    Two:
    <BLANKLINE>
    - one
        more
    - two
    """
    lines: list[str] = []
    fence, wider, inside = "", 0, False
    for line in markdown.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        mark, item = _FENCE.match(line), _ITEM.match(line)
        if not fence:
            if item and not inside and lines and lines[-1].strip():
                lines.append("")
            if line.strip():
                inside = bool(item) or (inside and indent > 0)
            wider = -(-indent // 2) * 4 - indent if inside and indent <= 6 else 0
        if mark:
            fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
        lines.append(" " * wider + line if line.strip() else line)
    return "\n".join(lines)


def _pages(nav: object) -> list[str]:
    """The sources of all pages of a navigation."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ()
    return [page for below in entries for page in _pages(below)]


def _add(files: Files, config: MkDocsConfig, path: str) -> None:
    files.append(File.generated(config, OUTSIDE + path, abs_src_path=str(ROOT / path)))


def on_post_build(config: MkDocsConfig) -> None:
    """Lead llms.txt to the site's pages."""
    index = Path(config.site_dir) / "llms.txt"
    text = index.read_text().replace("](../", f"]({OUTSIDE}").replace("README.md)", "index.html)")
    index.write_text(text.replace(".md)", ".html)"))
