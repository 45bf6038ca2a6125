"""Shows a run's progress: a line each step, and on a terminal a bar of what is under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from agl_core.cli.screen import Screen
from agl_core.training.progress import Phase, Silent, numbered


@dataclass
class _Bar:
    progress: Progress
    task: TaskID

    def advance(self, share: float, note: str = "") -> None:
        self.progress.update(self.task, completed=share, note=note)


class ConsoleObserver:
    """What the run says, a line each; on a terminal also a bar of the phase under way, with the reward so far."""

    def __init__(self, console: Screen, steps: int) -> None:
        self._console, self._steps = console, steps

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[Phase]:
        if not self._console.is_terminal:
            with Silent().phase(name, step) as phase:
                yield phase
            return
        title = f"{numbered(step, self._steps)}  {name}"
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            yield _Bar(progress, progress.add_task(title, total=1.0, note=""))

    def say(self, text: str) -> None:
        self._console.print(text)
