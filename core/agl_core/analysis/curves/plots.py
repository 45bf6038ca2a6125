"""Curves of runs as a picture: one panel for each held-out set, a band over the seeds."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

from agl_core.analysis.curves.metrics import held_out, read_metrics, series
from agl_core.config import CONFIG_FILE
from agl_core.errors import ConfigError

Curve: TypeAlias = Sequence[tuple[int, float]]
"""Steps, each with a mean reward."""

FORMATS = (".svg", ".png", ".pdf")
_MODES = {"greedy": "o-", "sampled": "s--"}
_OF_ITS_OWN = ("name", "seed", "runs", "folder")
"""What may differ between runs that are seeds of one thing."""


@dataclass(frozen=True, slots=True)
class Curves:
    """The rewards of one run."""

    training: Curve = ()
    held_out: Mapping[tuple[str, str], Curve] = field(default_factory=dict)
    """By held-out set and mode (greedy, sampled)."""


def read_curves(folder: Path) -> Curves:
    """Those of a run's metrics. ConfigError if there are none yet."""
    lines = read_metrics(folder)
    evaluations = {
        (kind.rpartition("/")[0], kind.rpartition("/")[2]): points for kind, points in held_out(lines).items()
    }
    found = Curves(series(lines, "train", "reward/mean"), evaluations)
    if not found.training and not evaluations:
        raise ConfigError(f"{folder} has no curves: no step and no evaluation of it has ended. Leave it out.")
    return found


def seeds_of(folders: Sequence[Path]) -> dict[str, list[Path]]:
    """Runs whose configurations differ in nothing but seed and name, by what their names have in common."""
    kinds: dict[str, list[Path]] = {}
    for folder in folders:
        config = tomllib.loads((folder / CONFIG_FILE).read_text())
        shared = {key: config[key] for key in config if key not in _OF_ITS_OWN}
        kinds.setdefault(json.dumps(shared, sort_keys=True, default=str), []).append(folder)
    named: dict[str, list[Path]] = {}
    for seeds in kinds.values():
        alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*(each.name for each in seeds), strict=False))
        common = "".join(letters[0] for letters in alike).rstrip("-_. ")
        named[next(name for name in (common, seeds[0].name, str(seeds[0])) if name and name not in named)] = seeds
    return named


def draw(kinds: Mapping[str, Sequence[Curves]], out: Path) -> None:
    """Draw them into `out`, an SVG, PNG or PDF file: lines are means over seeds, bands are from the worst to the best.

    `kinds` has for each kind of run, by its name, the curves of its seeds. ConfigError if matplotlib is missing, or the
    file's name has another ending.
    """
    runs = [each for seeds in kinds.values() for each in seeds]
    sets = list(dict.fromkeys(name for each in runs for name, _ in each.held_out))
    if not sets and any(each.training for each in runs):
        sets = [""]
    alone = len(kinds) == 1
    with panels(out, len(sets)) as row:
        for number, (kind, seeds) in enumerate(kinds.items()):
            for panel, name in zip(row, sets, strict=True):
                _draw_kind(panel, name, seeds, "" if alone else f"{kind}, ", None if alone else number)
                panel.set_title(name, fontsize=10)
        counts = sorted({len(seeds) for seeds in kinds.values()})
        title = None if counts == [1] else f"{' or '.join(map(str, counts))} seeds"
        row[-1].legend(fontsize=8, loc="best", title=title, title_fontsize=8)


def draw_apart(kinds: Mapping[str, Sequence[Curves]], out: Path) -> None:
    """Draw kinds of runs that have nothing in common: a panel for each, of its first held-out set.

    Otherwise as `draw`.
    """
    with panels(out, len(kinds), width=2.7) as row:
        for panel, (kind, seeds) in zip(row, kinds.items(), strict=True):
            headline = next(name for each in seeds for name, _ in each.held_out)
            _draw_kind(panel, headline, seeds, "", None)
            panel.set_title(f"{kind}, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}", fontsize=10)
        row[-1].legend(fontsize=8, loc="best")


@contextmanager
def panels(out: Path, count: int, width: float = 3.7) -> Iterator[Sequence[Any]]:
    """Panels side by side to draw on (matplotlib's `Axes`), of this width in inches; then they are written to `out`.

    The same drawing gives the same file, byte for byte. ConfigError as of `draw`.
    """
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"{out} does not say what to draw. Let its name end in {' or '.join(FORMATS)}.")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("Plots need matplotlib: pip install 'agl-core[plot]'") from error
    with matplotlib.rc_context({"svg.hashsalt": "agl"}):
        figure = Figure(figsize=(1 + width * count, 3.4), layout="constrained")
        row = figure.subplots(1, count, sharey=True, squeeze=False)[0]
        for panel in row:
            panel.grid(alpha=0.3)
            panel.set_xlabel("step")
        row[0].set_ylabel("mean reward")
        yield row
        ending = out.suffix.lower()[1:]
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(ending)
        figure.savefig(out, format=ending, dpi=150, metadata=undated)
    if ending == "svg":
        out.write_text("\n".join(line.rstrip() for line in out.read_text().splitlines()) + "\n")


def _draw_kind(panel: Any, name: str, seeds: Sequence[Curves], prefix: str, number: int | None) -> None:
    """The lines of one kind of run; alone, each has a colour, else all have that of the kind."""
    colours = ["grey", "C0", "C1"] if number is None else [f"C{number % 10}"] * 3
    _band(panel, [each.training for each in seeds], "-", colours[0], label=f"{prefix}training", linewidth=0.7)
    for colour, (mode, style) in zip(colours[1:], _MODES.items(), strict=True):
        curves = [each.held_out.get((name, mode), ()) for each in seeds]
        _band(panel, curves, style, colour, label=f"{prefix}{mode}", linewidth=1.4, markersize=4)


def _band(panel: Any, curves: Sequence[Curve], style: str, colour: str, **drawn: Any) -> None:
    by_step: dict[int, list[float]] = {}
    for step, reward in (point for each in curves for point in each):
        by_step.setdefault(step, []).append(reward)
    if not by_step:
        return
    steps = sorted(by_step)
    panel.plot(steps, [mean(by_step[step]) for step in steps], style, color=colour, **drawn)
    if len(curves) > 1:
        low, high = ([pick(by_step[step]) for step in steps] for pick in (min, max))
        panel.fill_between(steps, low, high, color=colour, alpha=0.2)
