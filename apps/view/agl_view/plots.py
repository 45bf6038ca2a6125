"""`agl plot`: the rewards of runs over their steps as a picture, one panel for each held-out set, a band over seeds."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from markupsafe import Markup

from agl_core.config import CONFIG_FILE
from agl_core.errors import ConfigError
from agl_core.reading.metrics import held_out, read_metrics, series
from agl_view.charts import Points, Scale, tag, text

_OF_ITS_OWN = ("name", "seed", "runs", "folder")
"""Settings that may differ between runs that are seeds of one thing."""
_GAP, _LEGEND_LINE = 24, 16
_COLOURS = ("#8a8f98", "#2563b8", "#c2571a", "#2e7d4f", "#8a4fa3", "#b8323f", "#6f5b2e", "#1f8a9c")
_STYLE = (
    "text{font:11px sans-serif;fill:#333}.title{font-size:13px}.grid{stroke:#ddd}.line{fill:none;stroke-width:1.5}"
    ".training{stroke-width:.8}.sampled{stroke-dasharray:5 3}.band{opacity:.18}"
)


@dataclass(frozen=True, slots=True)
class Curves:
    """The rewards of one run."""

    training: Points = ()
    held_out: Mapping[tuple[str, str], Points] = field(default_factory=dict)
    """By held-out set and mode (greedy, sampled)."""


class _Line(NamedTuple):
    """One line of a panel, with its seeds."""

    name: str
    kind: str
    """training, greedy or sampled."""
    colour: str
    seeds: Sequence[Points]


def read_curves(folder: Path) -> Curves:
    """Those of a run's metrics. ConfigError if there is none yet."""
    lines = read_metrics(folder)
    sets = {(kind.rpartition("/")[0], kind.rpartition("/")[2]): points for kind, points in held_out(lines).items()}
    curves = Curves(series(lines, "train", "reward/mean"), sets)
    if not curves.training and not sets:
        raise ConfigError(f"{folder} has no curves: no step and no evaluation of it has ended. Leave it out.")
    return curves


def seeds_of(folders: Sequence[Path]) -> dict[str, list[Path]]:
    """Runs whose configurations differ in nothing but seed and name, by what their names have in common."""
    kinds: dict[str, list[Path]] = {}
    for folder in folders:
        config = tomllib.loads((folder / CONFIG_FILE).read_text())
        shared = {key: config[key] for key in config if key not in _OF_ITS_OWN}
        kinds.setdefault(json.dumps(shared, sort_keys=True, default=str), []).append(folder)
    named: dict[str, list[Path]] = {}
    for seeds in kinds.values():
        alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*(seed.name for seed in seeds), strict=False))
        common = "".join(letters[0] for letters in alike).rstrip("-_. ")
        named[next(name for name in (common, seeds[0].name, str(seeds[0])) if name and name not in named)] = seeds
    return named


def draw(kinds: Mapping[str, Sequence[Curves]], out: Path) -> None:
    """Draw kinds of runs, each with the curves of its seeds, into an SVG file: a panel for each held-out set.

    Lines are means over seeds, bands are from the worst seed to the best. ConfigError if `out` has another ending.
    """
    sets = list(dict.fromkeys(name for seeds in kinds.values() for run in seeds for name, _ in run.held_out)) or [""]
    panels = {}
    for name in sets:
        panels[name] = [
            line
            for at, (kind, seeds) in enumerate(kinds.items())
            for line in _lines_of(seeds, name, f"{kind}, " if len(kinds) > 1 else "", at if len(kinds) > 1 else None)
        ]
    _write(panels, out)


def draw_apart(kinds: Mapping[str, Sequence[Curves]], out: Path) -> None:
    """Draw kinds of runs that have nothing in common: a panel for each, of its first held-out set."""
    panels = {}
    for kind, seeds in kinds.items():
        headline = next(name for run in seeds for name, _ in run.held_out)
        panels[f"{kind}, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"] = _lines_of(seeds, headline, "", None)
    _write(panels, out)


def _lines_of(seeds: Sequence[Curves], name: str, prefix: str, kind: int | None) -> list[_Line]:
    """The lines of one kind of run; alone, each has a colour, else all have that of the kind."""
    colours = _COLOURS[:3] if kind is None else [_COLOURS[(kind + 1) % len(_COLOURS)]] * 3
    lines = [_Line(f"{prefix}training", "training", colours[0], [run.training for run in seeds])]
    for colour, mode in zip(colours[1:], ("greedy", "sampled"), strict=True):
        lines.append(_Line(f"{prefix}{mode}", mode, colour, [run.held_out.get((name, mode), ()) for run in seeds]))
    return [line for line in lines if any(line.seeds)]


def _write(panels: Mapping[str, Sequence[_Line]], out: Path) -> None:
    if out.suffix.lower() != ".svg":
        raise ConfigError(f"{out} is not the name of an SVG file. Let it end in .svg.")
    points = [point for lines in panels.values() for line in lines for seed in line.seeds for point in seed]
    low, high = min(y for _, y in points), max(y for _, y in points)
    parts, x, bottom = [tag("style", {}, Markup(_STYLE))], 0.0, 0.0
    for title, lines in panels.items():
        steps = sorted({step for line in lines for seed in line.seeds for step, _ in seed})
        scale = Scale(steps, low, high, (380, 260))
        drawn = [*scale.axes(), text(scale.width / 2, 8, title, "middle", "title")]
        for at, line in enumerate(lines):
            drawn += _drawn(line, scale)
            below = scale.height + 14 + _LEGEND_LINE * at
            kind = {"class": f"line {line.kind}", "stroke": line.colour}
            drawn.append(tag("polyline", {**kind, "points": f"46,{below - 4} 70,{below - 4}"}))
            drawn.append(text(76, below, line.name, "start"))
            bottom = max(bottom, below + 8.0)
        parts.append(tag("g", {"transform": f"translate({x:.0f} 4)"}, Markup("").join(drawn)))
        x += scale.width + _GAP
    box = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {x - _GAP:.0f} {bottom + 4:.0f}"}
    size = {"width": f"{x - _GAP:.0f}", "height": f"{bottom + 4:.0f}"}
    out.write_text(str(tag("svg", {**box, **size}, Markup("").join(parts))) + "\n", encoding="utf-8")


def _drawn(line: _Line, scale: Scale) -> Iterable[Markup]:
    by_step: dict[int, list[float]] = {}
    for step, reward in (point for seed in line.seeds for point in seed):
        by_step.setdefault(step, []).append(reward)
    steps = sorted(by_step)
    if len(line.seeds) > 1:
        edge = [(step, max(by_step[step])) for step in steps] + [(step, min(by_step[step])) for step in steps[::-1]]
        yield tag("polygon", {"class": "band", "fill": line.colour, "points": scale.places(edge)})
    means = [(step, mean(by_step[step])) for step in steps]
    yield tag("polyline", {"class": f"line {line.kind}", "stroke": line.colour, "points": scale.places(means)})
    if line.kind != "training":
        for step, value in means:
            yield tag(
                "circle", {"fill": line.colour, "cx": f"{scale.x(step):.1f}", "cy": f"{scale.y(value):.1f}", "r": "2.5"}
            )
