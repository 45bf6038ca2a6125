"""Trains calc's agent under torch and by the Tinker API, with the same settings, and writes docs/tinker.md's table.

python docs/make_curves.py           # what is missing in docs/curves.json, then the page; it can be interrupted
python docs/make_curves.py --write   # no run, the page alone
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean

from make_readme import replaced

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "examples"))
from measured import EXAMPLES, Cell, Experiment, Result, Results, spread, table

from algorithms.tinker.tests.skyrl_tx import KEY, SkyrlTx

RESULTS, PAGE = Results(Path(__file__).with_name("curves.json")), Path(__file__).with_name("tinker.md")
SEEDS, STEPS = 6, 8
OWN: Mapping[str, tuple[str, ...]] = {
    "torch": ("engine.name=torch", "engine.torch.threads=1"),
    "tinker": ("engine.name=tinker",),
}
"""An engine's settings."""
ROWS = {
    "torch": ("torch", "4e-3"),
    "tinker": ("tinker", "4e-3"),
    "torch, 2.45 times the rate": ("torch", "9.8e-3"),
    "tinker, the rate over 2.45": ("tinker", "1.63e-3"),
}
"""By name, an engine and a learning rate. skyrl-tx draws A of an adapter 2.45 times as wide as peft."""
COMPARED = (("tinker", "torch"), ("tinker, the rate over 2.45", "torch"), ("tinker", "torch, 2.45 times the rate"))


@dataclass(frozen=True)
class ByTinker(Experiment):
    """The service is one of its own, so its address does not count as a setting."""

    def run(self, runs: Path) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            server = SkyrlTx(Path(folder), self.folder / "policy-qwen3", adapters=4, rows=8)
            own = (f"engine.tinker.base_url={server.url}", f"engine.tinker.base_model={server.base}")
            try:
                server.start()
                result = Experiment(self.folder, self.label, (*self.settings, *own), self.seed).run(runs)
            finally:
                server.kill()
        return result | {"digest": self.digest}


def experiments(row: str) -> list[Experiment]:
    """The runs of a row: `make quickstart-tinker`'s, but for the rate."""
    engine, rate = ROWS[row]
    settings = (
        *("policies.default.model.path=policy-qwen3", "policies.default.model.lora.rank=8"),
        *(f"policies.default.optimizer.learning_rate={rate}", "train.groups_per_step=8", f"train.steps={STEPS}"),
        *(f"eval.every={STEPS}", "eval.tasks=40", *OWN[engine]),
    )
    kind = ByTinker if engine == "tinker" else Experiment
    return [kind(EXAMPLES / "calc", f"curves/{row}", settings, seed) for seed in range(SEEDS)]


def of_step(step: int) -> Cell:
    return lambda runs: f"{mean(run['train_rewards'][step - 1] for run in runs):.2f}"


def while_training(run: Result) -> float:
    return mean(run["train_rewards"])


def p_value(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided: the share of all ways to split these values whose means differ at least as much."""
    values, size = [*one, *other], len(one)
    total = sum(values)

    def difference(chosen: Sequence[float]) -> float:
        return abs(sum(chosen) / size - (total - sum(chosen)) / (len(values) - size))

    splits = [difference(chosen) for chosen in combinations(values, size)]
    return mean(found >= difference(one) - 1e-12 for found in splits)


def lines() -> Iterator[str]:
    runs = {row: RESULTS.valid(experiments(row)) for row in ROWS}
    columns: dict[str, Cell] = {f"step {step}": of_step(step) for step in range(1, STEPS + 1)}
    columns["all steps"] = spread(while_training)
    for mode in ("sampled", "greedy"):
        columns[f"held out, {mode}"] = spread(lambda run, mode=mode: run["rewards"]["eval"]["after"][mode])
    yield from table("engine", runs, columns)
    for ours, others in COMPARED:
        if runs[ours] and runs[others]:
            one, other = (list(map(while_training, runs[row])) for row in (ours, others))
            difference = f"{mean(one) - mean(other):+.3f}; p = {p_value(one, other):.2f} by exchanging runs"
            yield from ("", f"All steps, *{ours}* less *{others}*: {difference}.")


def main() -> None:
    os.environ["TINKER_API_KEY"] = KEY
    if "--write" not in sys.argv[1:]:
        RESULTS.complete([experiment for row in ROWS for experiment in experiments(row)])
    PAGE.write_text(replaced(PAGE.read_text(), "docs/make_curves.py", "\n" + "\n".join(lines()) + "\n"))


if __name__ == "__main__":
    main()
