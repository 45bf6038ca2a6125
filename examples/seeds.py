"""Trains an example once per seed, and shows what all seeds reached.

    python examples/seeds.py examples/math --seeds 5

Runs come one after another, each a plain `agl train … --set seed=… --set name=…`, and its result is kept in the
example's `results.json` as soon as it ends: call it again to go on after an interruption, or for more seeds. At the
end the table is printed as Markdown, and `curves.svg` drawn; both need no run folder (see runs.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from runs import Cell, Experiment, Result, Results, average, table

from agl_core.analysis.curves.plots import Curves, draw

MODES = ("greedy", "sampled")


def results_of(example: Path) -> Results:
    return Results(example / "results.json")


def seeds_of(example: Path, count: int) -> list[Experiment]:
    """One run for each seed, of the example as it is."""
    return [Experiment(example, "", (), seed) for seed in range(count)]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", type=Path, help="the example's folder")
    parser.add_argument("--seeds", type=int, default=5, help="how many: 0, 1, …")
    options = parser.parse_args()
    results, seeds = results_of(options.example), seeds_of(options.example, options.seeds)
    results.complete(seeds, runs=Path("runs"))
    rows = {str(each.seed): results.valid([each]) for each in seeds}
    found = [result for runs in rows.values() for result in runs]
    columns = {f"`{name}`, {mode}": start_and_end(name, mode) for name in found[0]["rewards"] for mode in MODES}
    columns |= {"seconds": average(lambda run: run["seconds"])}
    columns |= {"rollouts": average(lambda run: sum(run["rollouts"].values()))}
    print("\n".join(table("seed", rows | ({"mean": found} if len(found) > 1 else {}), columns)))
    draw({options.example.name: [curves(each) for each in found]}, options.example / "curves.svg")


if __name__ == "__main__":
    main()
