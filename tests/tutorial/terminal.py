"""Plays the tutorial: an empty folder, and its commands as a reader types them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .pages import Block, blocks, replaced

ROOT = Path(__file__).parents[2]
_OTHERS = ("OPENAI_", "ANTHROPIC_", "AGL_", "PYTEST_", "COLUMNS")
"""Variables that a reader's terminal does not hand on."""
_PATIENCE = 900.0
"""Seconds for one command: training on a busy machine."""


class UnexpectedError(AssertionError):
    """A command failed, or printed something else than the box says."""


@dataclass
class Terminal:
    """A reader's folder, and what runs in it."""

    folder: Path
    _second: subprocess.Popen[bytes] | None = None
    _log: Path = field(init=False)

    def __post_init__(self) -> None:
        self._log = self.folder.with_name("second-terminal.log")

    def play(self, page: str) -> str:
        """Do what a page says, and return it with what was printed in its boxes. Raises UnexpectedError."""
        boxes: list[tuple[Block, str]] = []
        output, second = "", False
        for block in blocks(page):
            if block.is_file:
                (self.folder / block.title).write_text(block.text)
            elif block.commands:
                second = bool(block.title)
                output = self._start(block.commands) if second else "".join(map(self._run, block.commands))
            elif block.is_box:
                boxes.append((block, self._shown(block) if second else _checked(block, output)))
        return replaced(page, boxes)

    def close(self) -> None:
        """End what runs in the second terminal, as Ctrl-C does."""
        if self._second is not None and self._second.poll() is None:
            os.killpg(self._second.pid, signal.SIGINT)
            self._second.wait(60)
        self._second = None

    def _run(self, command: str) -> str:
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
        if ran.returncode != 0:
            raise UnexpectedError(f"$ {command}\nended with status {ran.returncode}:\n{ran.stdout}")
        return ran.stdout

    def _start(self, commands: list[str]) -> str:
        self.close()
        [command] = commands
        with self._log.open("wb") as log:
            self._second = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return ""

    def _shown(self, box: Block) -> str:
        """The box as soon as the second terminal shows what is in it."""
        assert self._second is not None
        until = time.monotonic() + 300
        while True:
            ended = self._second.poll() is not None
            found = box.shown(box.text, self._log.read_text())
            if found is not None:
                return found
            if ended or time.monotonic() > until:
                return _checked(box, self._log.read_text())
            time.sleep(0.1)


def _checked(box: Block, output: str) -> str:
    found = box.shown(box.text, output)
    if found is None:
        raise UnexpectedError(f"The page expects:\n{box.text}\nPrinted was:\n{output}")
    return found


def _environment() -> dict[str, str]:
    """A reader's: the installed environment, the repository as $AGL, and no keys or addresses of model servers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "AGL": str(ROOT), "PATH": path, "TERM": "dumb"}


def lines_of(pages: list[Path]) -> Iterator[str]:
    """Every command of these pages, in order."""
    for page in pages:
        for block in blocks(page.read_text()):
            yield from block.commands
