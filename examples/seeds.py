"""Trains an example once per seed, and shows what all seeds reached.

    python examples/seeds.py examples/math --seeds 5
    python examples/seeds.py examples/{math,sql,rag,smollm{,/calculator}} --write --together docs/pictures/learning.svg

Runs come one after another, each a plain `agl train … --set seed=… --set name=…`, and its result is kept in the
example's `results.json` as soon as it ends: call it again to go on after an interruption, or for more seeds. At the
end the table is printed as Markdown, and `curves.svg` drawn; both need no run folder (see measured.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from markupsafe import Markup
from measured import Cell, Experiment, Result, Results, average, table

from agl_view.charts import NARROW, Chart, Points, line_chart, tag, text

MODES = ("greedy", "sampled")
STYLE = "text{font:11px sans-serif;fill:#333}.grid{stroke:#ddd}.line{fill:none}.bar{opacity:.18}.target{fill:none}" + (
    "".join(
        f".line.c{at}{{stroke:{colour}}}.bar.c{at},.dot.c{at}{{fill:{colour}}}"
        for at, colour in enumerate(
            ("#8a8f98", "#2563b8", "#c2571a", "#2e8b57", "#8e44ad", "#b8860b", "#c0397b", "#17a2b8")
        )
    )
)
"""Of a picture, which stands alone; the pages of `agl view` have a style sheet."""


def start_and_end(held_out: str, mode: str) -> Cell:
    def cell(runs: Sequence[Result]) -> str:
        return " → ".join(
            f"{mean(r['rewards'][held_out][when][mode] for r in runs):.3f}" for when in ("before", "after")
        )

    return cell


def modes(results: Sequence[Result], held_out: str) -> list[str]:
    """The modes in which the held-out set was evaluated."""
    return [mode for mode in MODES if results[0]["rewards"][held_out]["before"].get(mode) is not None]


def chart(title: str, results: Sequence[Result], held_out: str) -> Chart:
    """Rewards in training and on one held-out set: means over the seeds, from the worst seed to the best."""
    seeds: dict[str, list[Points]] = {"training": [list(enumerate(r["train_rewards"], 1)) for r in results]}
    for mode in modes(results, held_out):
        seeds[mode] = [
            [(e["step"], e["reward"]) for e in r["evaluations"] if (e["set"], e["mode"]) == (held_out, mode)]
            for r in results
        ]
    return curves(title, seeds)


def curves(title: str, seeds: Mapping[str, Sequence[Points]]) -> Chart:
    """For each name the mean over its seeds, in a band from the worst to the best."""
    lines: dict[str, Points] = {}
    bands: dict[str, Points] = {}
    for name, of_seeds in seeds.items():
        by_step: dict[int, list[float]] = {}
        for step, reward in (point for points in of_seeds for point in points):
            by_step.setdefault(step, []).append(reward)
        lines[name], best, worst = (
            [(step, pick(by_step[step])) for step in sorted(by_step)] for pick in (mean, max, min)
        )
        bands[name] = [*best, *worst[::-1]]
    drawn = line_chart(title, "", lines, bands=bands)
    assert drawn is not None, "each run has steps"
    return drawn


def show(example: Path, results: Sequence[Result]) -> Chart:
    """Print the table, draw `curves.svg`, and return the chart of the first held-out set."""
    sets = list(results[0]["rewards"])
    columns = {f"`{name}`, {mode}": start_and_end(name, mode) for name in sets for mode in modes(results, name)}
    columns |= {"seconds": average(lambda run: run["seconds"])}
    columns |= {"rollouts": average(lambda run: sum(run["rollouts"].values()))}
    rows = {str(seed): [result] for seed, result in enumerate(results)}
    print("\n".join(table("seed", rows | ({"mean": results} if len(results) > 1 else {}), columns)))
    (example / "curves.svg").write_text(picture([chart(name, results, name) for name in sets]))
    seeds = f"{len(results)} seed{'s' if len(results) > 1 else ''}"
    return chart(f"{example.name}, {seeds}", results, sets[0])


def picture(charts: Sequence[Chart], size: tuple[int, int] = NARROW) -> str:
    """Line charts side by side as an SVG file, with their legends below."""
    width, height = size
    parts, lines = [tag("style", {}, Markup(STYLE))], max(len(chart.legend) for chart in charts)
    for at, chart in enumerate(charts):
        x = at * (width + 24)
        opening = f'<svg x="{x}" y="20" width="{width}" height="{height}" '
        parts += [text(x + width / 2, 14, chart.title, "middle"), Markup(str(chart.svg).replace("<svg ", opening, 1))]
        for line, (name, colour) in enumerate(chart.legend):
            y = height + 36 + 16 * line
            parts.append(tag("polyline", {"class": f"line {colour}", "points": f"{x + 46},{y - 4} {x + 70},{y - 4}"}))
            parts.append(text(x + 76, y, name, "start"))
    whole, below = len(charts) * (width + 24) - 24, height + 36 + 16 * lines
    box = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {whole} {below}"}
    return f"{tag('svg', {**box, 'width': str(whole), 'height': str(below)}, Markup('').join(parts))}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", type=Path, nargs="+", help="the examples' folders")
    parser.add_argument("--seeds", type=int, default=5, help="how many: 0, 1, …")
    parser.add_argument("--write", action="store_true", help="train nothing; show the seeds there are")
    parser.add_argument("--together", type=Path, help="also draw all examples side by side, into this file")
    options = parser.parse_args()
    together = []
    for example in options.examples:
        results = Results(example / "results.json")
        seeds = [Experiment(example, "", (), seed) for seed in range(options.seeds)]
        if not options.write:
            results.complete(seeds, runs=Path("runs"))
        kept = results.read()
        together.append(show(example, [kept[seed.name] for seed in seeds if seed.name in kept]))
    if options.together:
        options.together.write_text(picture(together))


if __name__ == "__main__":
    main()
