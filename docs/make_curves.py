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
SETTINGS = (
    *("policies.default.model.path=policy-qwen3", "policies.default.model.lora.rank=8"),
    *("policies.default.optimizer.learning_rate=4e-3", "train.groups_per_step=8", f"train.steps={STEPS}"),
    *(f"eval.every={STEPS}", "eval.tasks=40"),
)
"""Those of `make quickstart-tinker`."""
ENGINES: Mapping[str, tuple[str, ...]] = {
    "torch": ("engine.name=torch", "engine.torch.threads=1"),
    "tinker": ("engine.name=tinker",),
}


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


def experiments() -> Iterator[Experiment]:
    for seed in range(SEEDS):
        for engine, own in ENGINES.items():
            kind = ByTinker if engine == "tinker" else Experiment
            yield kind(EXAMPLES / "calc", f"curves/{engine}", (*SETTINGS, *own), seed)


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
    runs = {engine: RESULTS.valid(e for e in experiments() if e.label == f"curves/{engine}") for engine in ENGINES}
    columns: dict[str, Cell] = {f"step {step}": of_step(step) for step in range(1, STEPS + 1)}
    columns["all steps"] = spread(while_training)
    for mode in ("sampled", "greedy"):
        columns[f"held out, {mode}"] = spread(lambda run, mode=mode: run["rewards"]["eval"]["after"][mode])
    yield from table("engine", runs, columns)
    if len(sizes := {len(of) for of in runs.values()}) == 1 and sizes != {0}:
        trained, by_torch = (list(map(while_training, runs[engine])) for engine in ("tinker", "torch"))
        yield ""
        yield (
            f"All steps, tinker less torch, {len(trained)} seeds: {mean(trained) - mean(by_torch):+.3f}; "
            f"p = {p_value(trained, by_torch):.2f} by exchanging runs."
        )


def main() -> None:
    os.environ["TINKER_API_KEY"] = KEY
    if "--write" not in sys.argv[1:]:
        RESULTS.complete(list(experiments()))
    PAGE.write_text(replaced(PAGE.read_text(), "docs/make_curves.py", "\n" + "\n".join(lines()) + "\n"))


if __name__ == "__main__":
    main()
