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

from agl_view.plots import Curves, draw, draw_apart

MODES = ("greedy", "sampled")


def start_and_end(held_out: str, mode: str) -> Cell:
    def cell(runs: Sequence[Result]) -> str:
        return " → ".join(
            f"{mean(r['rewards'][held_out][when][mode] for r in runs):.3f}" for when in ("before", "after")
        )

    return cell


def curves(result: Result) -> Curves:
    """The rewards of a seed, in training and of its evaluations."""
    kinds = dict.fromkeys((each["set"], each["mode"]) for each in result["evaluations"])
    held_out = {
        kind: [(e["step"], e["reward"]) for e in result["evaluations"] if (e["set"], e["mode"]) == kind]
        for kind in kinds
    }
    return Curves(list(enumerate(result["train_rewards"], 1)), held_out)


def show(example: Path, results: Sequence[Result]) -> Sequence[Curves]:
    """Print the table, draw `curves.svg`, and return its curves."""
    columns = {f"`{name}`, {mode}": start_and_end(name, mode) for name in results[0]["rewards"] for mode in MODES}
    columns |= {"seconds": average(lambda run: run["seconds"])}
    columns |= {"rollouts": average(lambda run: sum(run["rollouts"].values()))}
    rows = {str(seed): [result] for seed, result in enumerate(results)}
    print("\n".join(table("seed", rows | ({"mean": results} if len(results) > 1 else {}), columns)))
    found = [curves(each) for each in results]
    draw({example.name: found}, example / "curves.svg")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", type=Path, nargs="+", help="the examples' folders")
    parser.add_argument("--seeds", type=int, default=5, help="how many: 0, 1, …")
    parser.add_argument("--write", action="store_true", help="train nothing; show the seeds there are")
    parser.add_argument("--together", type=Path, help="also draw all examples side by side, into this file")
    options = parser.parse_args()
    together = {}
    for example in options.examples:
        results = Results(example / "results.json")
        seeds = [Experiment(example, "", (), seed) for seed in range(options.seeds)]
        if not options.write:
            results.complete(seeds, runs=Path("runs"))
        found = results.read()
        together[seeds[0].example] = show(example, [found[each.name] for each in seeds if each.name in found])
    if options.together:
        draw_apart(together, options.together)


if __name__ == "__main__":
    main()
