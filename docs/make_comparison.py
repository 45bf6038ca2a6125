"""Trains the examples with every algorithm, credit rule and seed, and writes docs/comparison.md.

    python docs/make_comparison.py                  # what is missing in docs/comparison.json, then the page
    python docs/make_comparison.py --minutes 30     # start no further run after half an hour; go on later
    python docs/make_comparison.py --only trip      # runs whose name begins so
    python docs/make_comparison.py --write          # no run, the page alone

Every result is kept as soon as its run ends, so it can be interrupted at any time. A result is taken again when the
example's configuration, policy or code has changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("comparison.json")
PAGE = Path(__file__).with_name("comparison.md")
SEEDS = (0, 1, 2)
THRESHOLDS = (0.77, 0.90)
WINDOW = 3

ALGORITHMS = ("grpo", "ppo", "reinforce++")
CREDIT = ("identical", "discounted", "air", "stepwise", "immediate")
PAIRS = {
    f"{algorithm} × {credit}": (f"algorithm.name={algorithm}", f"credit.name={credit}")
    for algorithm in ALGORITHMS
    for credit in CREDIT
} | {
    f"{algorithm}, across calls × immediate": (
        f"algorithm.name={algorithm}",
        f'algorithm."{algorithm}".across_calls=true',
        "credit.name=immediate",
    )
    for algorithm in ("ppo", "reinforce++")
}
"""Every pair that is allowed: rewards of single calls are for algorithms that own the time axis (`across_calls`)."""

CAPPED = {
    "trip": ("eval.tasks=40",),
    "calc": ("engine.torch.threads=1", "train.steps=20", "train.groups_per_step=8", "eval.every=20", "eval.tasks=40"),
}
"""How runs of an example are kept short."""

AIR = "rewards.tool_results.weight=1"
KL = "algorithm.grpo.beta=0.04"
ABLATION: dict[str, tuple[str, ...]] = {
    "grpo × identical": (),
    "grpo × discounted": ("credit.name=discounted",),
    "grpo × stepwise": ("credit.name=stepwise",),
    "grpo × air": ("credit.name=air",),
    "grpo × identical, tool results as rewards": (AIR,),
    "grpo × discounted, tool results as rewards": ("credit.name=discounted", AIR),
    "grpo × identical, KL with β = 0.04": (KL,),
    "grpo × stepwise, KL with β = 0.04": ("credit.name=stepwise", KL),
}
"""What is changed in the trip example, one thing or two at a time; those that are pairs too are run once."""


@dataclass(frozen=True)
class Experiment:
    """One run: an example, what is changed in it, and a seed."""

    example: str
    label: str
    changes: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        return f"{self.example}/{self.label}/seed {self.seed}"

    @property
    def settings(self) -> list[str]:
        return [*CAPPED[self.example], *self.changes]

    @property
    def digest(self) -> str:
        """Of everything that decides the result, but agl's own code: configuration, policy, agent and tasks."""
        folder = ROOT / "examples" / self.example
        config = tomllib.loads((folder / "train.toml").read_text())
        for section in ("algorithm", "credit"):
            chosen = dict(each.split("=", 1) for each in self.settings).get(f"{section}.name", config[section]["name"])
            config[section] = {key: value for key, value in config[section].items() if key in ("name", chosen)}
        digest = hashlib.sha256(json.dumps([config, self.settings], sort_keys=True).encode())
        code = [file for file in folder.glob("*.py") if not file.name.startswith("make_")]
        for file in sorted([*code, *(folder / "policy").iterdir()]):
            digest.update(file.read_bytes())
        return digest.hexdigest()[:16]


def experiments() -> Iterator[Experiment]:
    """All of them, seed by seed, so that an interrupted table has all its rows first."""
    for example in CAPPED:
        for seed in SEEDS:
            for label, changes in PAIRS.items():
                yield Experiment(example, label, changes, seed)
            if example == "trip":
                for label, changes in ABLATION.items():
                    if label not in PAIRS:
                        yield Experiment(example, label, changes, seed)


def run(experiment: Experiment) -> dict[str, Any]:
    """Train, and return what the tables need. RuntimeError if training fails."""
    with tempfile.TemporaryDirectory() as runs:
        command = [str(Path(sys.executable).with_name("agl")), "train", f"examples/{experiment.example}/train.toml"]
        command += ["--seed", str(experiment.seed), "--set", f"runs={runs}", "--set", "name=run"]
        for setting in experiment.settings:
            command += ["--set", setting]
        spent = cpu_seconds()
        ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stdout[-2000:]}")
        folder = Path(runs) / "run"
        summary = json.loads((folder / "summary.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    result = {
        "digest": experiment.digest,
        "reward": summary["reward"],
        "train_rewards": [round(reward, 4) for reward in summary["train_rewards"]],
        "cpu_seconds": round(cpu_seconds() - spent, 1),
    }
    if "eval/sampled/reward/memory_first" in last:
        result["memory_first"] = last["eval/sampled/reward/memory_first"]
    return result


def cpu_seconds() -> float:
    """What the processes started from here have used so far, and those that they started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def steps_to(rewards: Sequence[float], threshold: float) -> int | None:
    """The first step whose training reward, the mean of it and the `WINDOW` - 1 before it, reaches the threshold.

    >>> steps_to([0.5, 0.8, 0.8, 0.8], 0.77), steps_to([0.5, 0.5, 0.5], 0.77)
    (4, None)
    """
    for end in range(WINDOW, len(rewards) + 1):
        if statistics.mean(rewards[end - WINDOW : end]) >= threshold:
            return end
    return None


def read() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text())) if RESULTS.is_file() else {}


def keep(results: dict[str, Any]) -> None:
    part = RESULTS.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    os.replace(part, RESULTS)


def mean_and_range(values: Sequence[float]) -> str:
    spread = f" ({min(values):.2f}–{max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def median_steps(runs: Sequence[dict[str, Any]], threshold: float) -> str:
    found = [steps_to(each["train_rewards"], threshold) for each in runs]
    reached = [step for step in found if step is not None]
    if len(reached) < len(found):
        return f"{len(reached)} of {len(found)} runs" if reached else "never"
    return f"{statistics.median(reached):g}"


def table(example: str, labels: Sequence[str], results: dict[str, Any]) -> Iterator[str]:
    """One row per label; runs that are missing or out of date are left out of it."""
    memory = example == "trip"
    head = ["run", "seeds", "before", "after, greedy", "after, sampled"]
    head += ["memory first"] if memory else []
    head += ["while training", *(f"steps to {threshold:.2f}" for threshold in THRESHOLDS), "CPU seconds"]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    by_name = {each.name: each for each in experiments()}
    for label in labels:
        names = [f"{example}/{label}/seed {seed}" for seed in SEEDS]
        runs = [results[n] for n in names if n in results and results[n]["digest"] == by_name[n].digest]
        if not runs:
            yield f"| {label} | 0 |" + " |" * (len(head) - 2)
            continue
        row = [label, str(len(runs)), mean_and_range([each["reward"]["before"]["sampled"] for each in runs])]
        row += [mean_and_range([each["reward"]["after"][mode] for each in runs]) for mode in ("greedy", "sampled")]
        row += [mean_and_range([each["memory_first"] for each in runs])] if memory else []
        row += [mean_and_range([statistics.mean(each["train_rewards"]) for each in runs])]
        row += [median_steps(runs, threshold) for threshold in THRESHOLDS]
        row += [f"{statistics.mean([each['cpu_seconds'] for each in runs]):.0f}"]
        yield f"| {' | '.join(row)} |"


def page(results: dict[str, Any]) -> str:
    """docs/comparison.md: what a person wrote (comparison.head.md), then the tables."""
    parts = [PAGE.with_name("comparison.head.md").read_text().rstrip(), ""]
    parts += ["## trip: every algorithm with every credit rule", "", *table("trip", list(PAIRS), results), ""]
    parts += ["## trip: what helps, with GRPO", "", *table("trip", list(ABLATION), results), ""]
    parts += ["## calc: every algorithm with every credit rule", "", *table("calc", list(PAIRS), results), ""]
    return "\n".join(parts).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no further run after so long")
    parser.add_argument("--only", default="", help="runs whose name begins so, for instance 'trip/ppo'")
    parser.add_argument("--write", action="store_true", help="write the page from the results there are")
    options = parser.parse_args()
    results, began = read(), time.monotonic()
    missing = [
        each
        for each in experiments()
        if each.name.startswith(options.only) and results.get(each.name, {}).get("digest") != each.digest
    ]
    for number, experiment in enumerate([] if options.write else missing, 1):
        if time.monotonic() - began > 60 * options.minutes:
            print(f"time is up; {len(missing) - number + 1} runs are left, call it again to go on")
            break
        print(f"{number}/{len(missing)} {experiment.name}", end=" … ", flush=True)
        results[experiment.name] = run(experiment)
        keep(results)
        print(f"{results[experiment.name]['reward']['after']}", flush=True)
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
