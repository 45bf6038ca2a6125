"""Does the tutorial, and writes what it prints into the boxes of its pages: `python -m tests.tutorial.write`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from .pages import PAGES
from .terminal import Terminal


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name) / "tutorial"
        folder.mkdir()
        terminal = Terminal(folder)
        try:
            written = {page: terminal.play(page.read_text()) for page in PAGES}
        finally:
            terminal.close()
    for page, text in written.items():
        page.write_text(text)


if __name__ == "__main__":
    main()
