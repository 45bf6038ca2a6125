"""`agl plot`: the curves of runs as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Runs = Annotated[list[Path], typer.Argument(help="Runs, by folder or by name below ./runs.", metavar="RUN...")]
Out = Annotated[Path, typer.Option(help="The file to write: its name ends in .svg, .png or .pdf.")]


def plot(run: Runs, out: Out = Path("curves.svg")) -> None:
    """Draw the rewards of runs over their steps, in training and on each held-out set.

    Runs that differ in nothing but seed and name are one line, the mean, with a band from the worst seed to the best.
    It needs matplotlib: pip install 'agl-core[plot]'.
    """
    from agl_core.analysis.curves.plots import draw, read_curves, seeds_of
    from agl_core.analysis.runs import find_run
    from agl_core.cli.shared.screen import Screen

    kinds = seeds_of([find_run(each) for each in run])
    draw({name: list(map(read_curves, folders)) for name, folders in kinds.items()}, out)
    counts = (f"{name} ({len(seeds)} seed{'s' if len(seeds) > 1 else ''})" for name, seeds in kinds.items())
    Screen().print(f"{out}: " + "; ".join(counts))
