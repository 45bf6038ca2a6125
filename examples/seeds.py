"""Trains an example once per seed, and shows what all seeds reached.

    python examples/seeds.py examples/math --seeds 5
    python examples/seeds.py examples/{math,sql,rag,smollm{,/calculator}} --write --together docs/pictures/learning.svg

Runs come one after another, each a plain `agl train … --set seed=… --set name=…`, and its result is kept in the
example's `results.json` as soon as it ends: call it again to go on after an interruption, or for more seeds. At the
end the table is printed as Markdown, and `curves.svg` drawn; both need no run folder (see measured.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from measured import Cell, Experiment, Result, Results, average, table

from agl_view.charts import Chart, Points, line_chart, picture

MODES = ("greedy", "sampled")


def start_and_end(held_out: str, mode: str) -> Cell:
    def cell(runs: Sequence[Result]) -> str:
        return " → ".join(
            f"{mean(r['rewards'][held_out][when][mode] for r in runs):.3f}" for when in ("before", "after")
        )

    return cell


def chart(title: str, results: Sequence[Result], held_out: str) -> Chart:
    """Rewards in training and on one held-out set: means over the seeds, from the worst seed to the best."""
    seeds: dict[str, list[Points]] = {"training": [list(enumerate(r["train_rewards"], 1)) for r in results]}
    for mode in MODES:
        seeds[mode] = [
            [(e["step"], e["reward"]) for e in r["evaluations"] if (e["set"], e["mode"]) == (held_out, mode)]
            for r in results
        ]
    lines: dict[str, Points] = {}
    bands: dict[str, Points] = {}
    for name, of_seeds in seeds.items():
        by_step: dict[int, list[float]] = {}
        for step, reward in (point for points in of_seeds for point in points):
            by_step.setdefault(step, []).append(reward)
        steps = sorted(by_step)
        lines[name] = [(step, mean(by_step[step])) for step in steps]
        best, worst = ([(step, pick(by_step[step])) for step in steps] for pick in (max, min))
        bands[name] = [*best, *worst[::-1]]
    drawn = line_chart(title, "", lines, bands=bands)
    assert drawn is not None, "each run has steps"
    return drawn


def show(example: Path, results: Sequence[Result]) -> Chart:
    """Print the table, draw `curves.svg`, and return the chart of the first held-out set."""
    columns = {f"`{name}`, {mode}": start_and_end(name, mode) for name in results[0]["rewards"] for mode in MODES}
    columns |= {"seconds": average(lambda run: run["seconds"])}
    columns |= {"rollouts": average(lambda run: sum(run["rollouts"].values()))}
    rows = {str(seed): [result] for seed, result in enumerate(results)}
    print("\n".join(table("seed", rows | ({"mean": results} if len(results) > 1 else {}), columns)))
    sets = list(results[0]["rewards"])
    (example / "curves.svg").write_text(picture([chart(name, results, name) for name in sets]))
    seeds = f"{len(results)} seed{'s' if len(results) > 1 else ''}"
    return chart(f"{example.name}, {seeds}", results, sets[0])


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
        found = results.read()
        together.append(show(example, [found[each.name] for each in seeds if each.name in found]))
    if options.together:
        options.together.write_text(picture(together))


if __name__ == "__main__":
    main()
