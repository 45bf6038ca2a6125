"""A reader's tutorial: an empty folder, and the pages' commands as a reader types them, in order.

| fence | meaning |
|---|---|
| ``python`` or ``toml`` with a title | a file of that name |
| ``console`` | commands, each after ``$ ``; with a title they run in a second terminal until the next such block |

The output of commands, in ``text`` blocks, is an example.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorial").glob("[0-9]-*.md"))
FENCE = re.compile(r'^```(python|toml|console)(?: title="(.*?)")?\n(.*?)^```$', re.M | re.S)
OTHERS = ("OPENAI_", "ANTHROPIC_", "AGL_", "PYTEST_", "COLUMNS")
"""Variables that a reader's terminal does not hand on."""
PATIENCE = 900.0
"""Seconds for one command: training on a busy machine."""


class Terminals:
    """A reader's folder, and the command in a second terminal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
        path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
        self.environment = {**kept, "AGL": str(ROOT), "PATH": path, "TERM": "dumb"}
        self.second: subprocess.Popen[bytes] | None = None

    def play(self, page: str) -> None:
        """Write the page's files, and run its commands, each of which must succeed."""
        for language, title, text in FENCE.findall(page):
            commands = re.findall(r"^\$ (.+)$", text, re.M)
            if language != "console":
                if title:
                    (self.folder / title).write_text(text)
            elif title:
                self.close()
                [command] = commands
                log = self.folder / "second-terminal.log"
                self.second = subprocess.Popen(
                    ["bash", "-c", f"exec {command} >{log} 2>&1"],
                    cwd=self.folder,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
                self.wait_for(log, "view:  http" if "view" in command else "serving at http")
            else:
                for command in commands:
                    self.run(command)

    def run(self, command: str) -> None:
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert ran.returncode == 0, f"$ {command}\n{ran.stdout}"

    def wait_for(self, log: Path, address: str) -> None:
        """The commands of the second terminal start a server, and print where."""
        assert self.second is not None
        until = time.monotonic() + 300
        while not (log.exists() and address in log.read_text()):
            assert self.second.poll() is None, log.read_text()
            assert time.monotonic() < until
            time.sleep(0.1)

    def close(self) -> None:
        """End what runs in the second terminal, as Ctrl-C does."""
        if self.second is not None and self.second.poll() is None:
            os.killpg(self.second.pid, signal.SIGINT)
            self.second.wait(60)


@pytest.mark.storm
@pytest.mark.timeout(3000)
def test_the_tutorial_leads_from_an_agent_to_a_better_one(tmp_path: Path) -> None:
    terminals = Terminals(tmp_path)
    try:
        for page in PAGES:
            terminals.play(page.read_text())
    finally:
        terminals.close()

    run = tmp_path / "runs" / "my_agent"
    reward = json.loads((run / "summary.json").read_text())["reward"]
    assert reward["before"]["greedy"] < 0.2
    assert reward["after"]["greedy"] > 0.5
    assert reward["after"]["sampled"] > 0.5
    assert (tmp_path / "my-policy" / "model.safetensors").is_file()
