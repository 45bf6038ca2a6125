"""Shows a run's progress: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from agl_core.cli.screen import Screen
from agl_core.training.progress import Phase


@dataclass
class _Bar:
    progress: Progress
    task: TaskID

    def advance(self, share: float, note: str = "") -> None:
        self.progress.update(self.task, completed=share, note=note)


@dataclass
class _Line:
    note: str = ""

    def advance(self, share: float, note: str = "") -> None:
        self.note = note


class ConsoleObserver:
    """One bar per phase on a terminal, with the reward so far; one line per finished phase in a log file."""

    def __init__(self, console: Screen, steps: int) -> None:
        self._console, self._steps = console, steps

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[Phase]:
        title = f"step {step:>3}/{self._steps}  {name}"
        if not self._console.is_terminal:
            line, started = _Line(), time.monotonic()
            yield line
            self._console.print(f"{title}  {time.monotonic() - started:.1f} s  {line.note}")
            return
        columns = (
            TextColumn("{task.description:<44}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            yield _Bar(progress, progress.add_task(title, total=1.0, note=""))

    def say(self, text: str) -> None:
        self._console.print(text)
