"""The screen: plain text on it, and the progress of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from agl_core.analysis.text.words import harmless
from agl_core.protocols import Upstream
from agl_core.training.metrics import Observer, Phase, numbered

_UNLIMITED = 1 << 16


class Screen(Console):
    """A console on which every string is text, also in tables: no markup, and nothing that a terminal would obey.

    The terminal wraps lines. In a pipe or a file nothing is wrapped or cropped, unless COLUMNS says how wide it is.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _UNLIMITED

    def print(self, *objects: Any, **options: Any) -> None:
        if all(isinstance(each, str) for each in objects):
            options.setdefault("soft_wrap", True)
        super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(harmless(text), **options)


@dataclass
class _Bar(Phase):
    progress: Progress
    task: TaskID

    def advance(self, share: float, note: str = "") -> None:
        self.progress.update(self.task, completed=share, note=note)


class ConsoleObserver(Observer):
    """What the run says, a line each; on a terminal also a bar of the phase under way, with the reward so far."""

    def __init__(self, console: Screen, steps: int, serving: Callable[[Upstream], None] | None = None) -> None:
        self._console, self._steps, self._serving = console, steps, serving

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[Phase]:
        if not self._console.is_terminal:
            yield Phase()
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

    def serving(self, upstream: Upstream) -> None:
        if self._serving is not None:
            self._serving(upstream)
