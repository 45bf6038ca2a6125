"""The site of docs/: it builds without a warning, links and anchors included, and loads nothing from the internet."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "docs" / "site" / "mkdocs.yml"


LOADED = re.compile(
    r"""<(?:script|img|iframe|source|link(?! rel="(?:canonical|prev|next)"))\b[^>]*?\b(?:src|href)="?([^" >]+)"""
)
"""What a browser loads with a page: scripts, styles, fonts, pictures."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built anew."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    built = subprocess.run(
        [*command, "--config-file", CONFIGURATION, "--site-dir", folder],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_of_the_navigation_is_built_and_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        addresses = LOADED.findall(page.read_text())
        assert addresses
        assert [address for address in addresses if re.match(r"(https?:)?//", address)] == [], page
    for style in site.rglob("*.css"):
        assert re.findall(r"url\(['\"]?(?:https?:)?//[^)]*|@import[^;]*//", style.read_text()) == [], style


def test_links_lead_from_the_site_to_readmes_and_their_files(site: Path) -> None:
    core = (site / "repository" / "core" / "index.html").read_text()

    assert 'href="../../view.html"' in core
    assert (site / "repository" / "examples" / "calc" / "train.toml").is_file()
    assert (site / "repository" / "examples" / "calc" / "curves.svg").is_file()
    linked = re.findall(r"\]\((.+?)\)", (site / "llms.txt").read_text())
    sources = re.findall(r"^ +- (\S+\.md)$", CONFIGURATION.read_text(), re.MULTILINE)
    assert linked == [source.replace("README.md", "index.html").replace(".md", ".html") for source in sources]
    assert [link for link in linked if not (site / link).is_file()] == []
    assert not list(site.rglob("make_*.py"))
    assert not list(site.rglob("mkdocs.yml"))
