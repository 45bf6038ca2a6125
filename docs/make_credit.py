"""Makes the runs on credit of docs/experiments.md, without a server (examples/beds/simulate.py), and writes its tables.

python docs/make_credit.py                  # what is missing in docs/credit.json, then the page; it can be interrupted
python docs/make_credit.py --quick          # H1 and H4, three arms, three seeds, five minutes; writes nothing
python docs/make_credit.py --write          # no run, the page alone
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from make_readme import replaced

from agl_core.types import AlarmName
from agl_server.health.table import ALARMS
from agl_view.charts import line_chart

sys.path.append(str(Path(__file__).parents[1] / "examples"))
sys.path.append(str(Path(__file__).parents[1] / "examples" / "beds"))
from beds import Bed, Worth
from measured import without_words
from seeds import picture
from simulate import BEDS, GROUP_SIZE, GROUPS, ORACLE, Arm, Rules, Simulation, run

EXAMPLES = Path(__file__).parents[1] / "examples"
RESULTS, PAGE = (Path(__file__).with_name(name) for name in ("credit.json", "experiments.md"))
FIGURE = PAGE.with_name("pictures") / "credit.svg"
SEEDS, TUNING_SEEDS, STEPS = 12, 2, 25
RATES = (2e-3, 4e-3)

TEXTWORLD = "TextWorld, 20 calls, 3%"
CELLS: Mapping[str, Mapping[str, Any]] = {
    "errand, 20 calls, 0.5%": {"bed": Bed.ERRAND, "level": "swan", "things": 8, "calls": 20},
    "errand, 20 calls, 10%": {"bed": Bed.ERRAND, "level": "hawk", "things": 8, "calls": 20},
    "errand, 5 calls, 1%": {"bed": Bed.ERRAND, "level": "mule", "things": 4, "calls": 5},
    "errand, 40 calls, 1%": {"bed": Bed.ERRAND, "level": "hawk", "things": 16, "calls": 40},
    "farm, 16 calls, 5%": {"bed": Bed.ERRAND, "level": "frog", "things": 6, "calls": 16, "farm": True},
    "misleading, 20 calls, 2%": {"bed": Bed.ERRAND, "level": "lamb", "things": 8, "calls": 20, "wrong_ok": 0.9},
    "walk, 20 calls, 1%": {"bed": Bed.WALK, "level": "frog", "calls": 20},
    "luck, 20 calls, 26%": {"bed": Bed.ERRAND, "level": "frog", "things": 8, "calls": 20, "luck": 0.5},
    TEXTWORLD: {"calls": 20},
}
"""Games, by what the policy wins before training."""
TUNED = ("errand, 20 calls, 10%", "walk, 20 calls, 1%")
TEXTWORLD_RATES = (5e-4, 1e-3)
"""Added after three seeds at the step sizes of the other games, at which every arm lost what the policy could do."""
UNKNOWN = (TEXTWORLD, "oracle")
"""No run: what a call is worth there is not known."""

ACROSS = {"across_calls": True}
ARMS: Mapping[str, Arm] = {
    "identical": Arm("identical"),
    "air": Arm("air"),
    "air, mixed": Arm("air", {"form": "mixed"}),
    "gigpo": Arm("gigpo"),
    "ppo, across calls": Arm("immediate", algorithm="ppo", options={**ACROSS, "critic_learning_rate": 4e-3}),
    "oracle": Arm(ORACLE),
    "immediate": Arm("immediate"),
}
QUICK_ARMS = ("identical", "air", "air, mixed")


@dataclass(frozen=True)
class Experiment:
    cell: str
    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.cell}/{self.arm}/{self.rate:g}/{self.seed}"

    def run(self) -> dict[str, Any]:
        result = run(CELLS[self.cell], ARMS[self.arm], self.seed, self.rate, STEPS, rules=rules_of(self.cell))
        return {**result, "digest": digest(self.cell)}


def rules_of(cell: str) -> Rules:
    """Imports TextWorld only where it is played: `make textworld` installs it."""
    if cell != TEXTWORLD:
        return BEDS
    sys.path.append(str(EXAMPLES / "textworld"))
    from in_process import RULES

    return RULES


def rates_of(cell: str) -> tuple[float, float]:
    """The step sizes of which each arm has the better one, by its mean area on seeds of their own."""
    return TEXTWORLD_RATES if cell == TEXTWORLD else RATES


def tuning(cells: Sequence[str] = (*TUNED, TEXTWORLD)) -> Iterator[Experiment]:
    for cell, seed, arm in product(cells, range(1000, 1000 + TUNING_SEEDS), ARMS):
        if (cell, arm) != UNKNOWN:
            yield from (Experiment(cell, arm, rate, seed) for rate in rates_of(cell))


def compared(results: Mapping[str, Any]) -> Iterator[Experiment]:
    """Seed by seed, so that an interrupted page has rows of all cells; empty until the rates are known.

    TextWorld, of which there is no hypothesis, comes last.
    """
    played = [cell for cell in CELLS if cell != TEXTWORLD]
    for seed, cell in [*product(range(SEEDS), played), *product(range(SEEDS), [TEXTWORLD])]:
        yield from (Experiment(cell, arm, rate, seed) for arm, rate in chosen_rates(results, cell).items())


def explored() -> Iterator[Experiment]:
    """Afterwards, no part of the plan: does `air` hold what it learned with many calls at the smaller step size?"""
    for seed in range(6):
        yield from (Experiment(LONG, arm, RATES[0], seed) for arm in ("air", "identical"))


def chosen_rates(results: Mapping[str, Any], cell: str) -> dict[str, float]:
    """The step size of each arm; empty until all are tried."""
    tried = [*tuning([TEXTWORLD] if cell == TEXTWORLD else TUNED)]
    if any(experiment.name not in results for experiment in tried):
        return {}
    areas = defaultdict[tuple[str, float], list[float]](list)
    for experiment in tried:
        areas[experiment.arm, experiment.rate].append(area(results[experiment.name]))
    arms = dict.fromkeys(experiment.arm for experiment in tried)
    return {arm: max(rates_of(cell), key=lambda rate, arm=arm: fmean(areas[arm, rate])) for arm in arms}  # type: ignore[misc]


def before(cell: str) -> str:
    """The name of what the policy wins before training."""
    return f"{cell}/before"


def won_before(cell: str) -> float:
    """The exact worth of a game before training, on average over sixty."""
    simulation, rng = Simulation(ARMS["identical"], 0, RATES[0]), random.Random(0)
    worth = Worth(simulation.shares_by_prompt())
    return fmean(worth.value(BEDS.first(BEDS.draw(rng, **CELLS[cell]))) for _ in range(60))


def complete() -> None:
    """Run what is missing, one process for each core; every result is kept as soon as its run ends."""
    results = read()
    for cell in CELLS:
        if cell != TEXTWORLD and before(cell) not in results:
            results[before(cell)] = {"won": round(won_before(cell), 4), "digest": digest(cell)}
    for phase in (tuning, lambda: compared(results), explored):
        missing = [experiment for experiment in phase() if experiment.name not in results]
        for number, (experiment, result) in enumerate(in_parallel(missing), 1):
            results[experiment.name] = result
            lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(results[name])}" for name in sorted(results))
            part = RESULTS.with_suffix(".part")
            part.write_text(f"{{\n{lines}\n}}\n")
            os.replace(part, RESULTS)
            print(f"{number}/{len(missing)} {experiment.name}: {area(result):.3f}", file=sys.stderr, flush=True)


def in_parallel(experiments: Iterable[Experiment]) -> Iterator[tuple[Experiment, Any]]:
    with get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        yield from pool.imap_unordered(_run, experiments)


def _run(experiment: Experiment) -> tuple[Experiment, Any]:
    return experiment, experiment.run()


def read() -> dict[str, Any]:
    """The results that today's games, policy and rules would give again."""
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return {name: result for name, result in results.items() if result["digest"] == digest(name.split("/")[0])}


@cache
def digest(cell: str) -> str:
    """The digest of games, policy and the rules that compare calls; agl's engine and algorithms are not in it."""
    code = [EXAMPLES / "beds" / f"{name}.py" for name in ("beds", "bed_plugin", "simulate")]
    code += [EXAMPLES.parent / "rewards" / "agl_rewards" / f"{name}.py" for name in ("air", "group_credit")]
    code += [EXAMPLES / "textworld" / f"{name}.py" for name in ("games", "in_process") if cell == TEXTWORLD]
    made = hashlib.sha256("".join(without_words(file.read_text()) for file in code).encode())
    for file in sorted((EXAMPLES / ("textworld" if cell == TEXTWORLD else "beds") / "policy").iterdir()):
        made.update(file.read_bytes())
    return made.hexdigest()[:16]


# The numbers of a run.


def area(result: Mapping[str, Any]) -> float:
    """The mean reward of all training steps: what a run learned, and how soon."""
    return fmean(result["rewards"])


def rollouts_to_half(result: Mapping[str, Any]) -> float:
    """The rollouts until the mean of two steps reaches a half; infinite if it never does."""
    rewards = result["rewards"]
    step = next((i for i in range(2, len(rewards) + 1) if fmean(rewards[i - 2 : i]) >= 0.5), np.inf)
    return step * GROUPS * GROUP_SIZE


def after(result: Mapping[str, Any]) -> float:
    return float(result["after"])


def fired(result: Mapping[str, Any], by_step: int) -> bool:
    """True if the alarm `tools_farmed` is raised by this step."""
    signal = ALARMS[AlarmName.TOOLS_FARMED].signal
    assert signal is not None
    numbers = [
        {"reward/mean": reward, "tool_results/ok": ok}
        for reward, ok in zip(result["rewards"], result["tools_ok"], strict=True)
    ]
    return any(signal.check(numbers[:step], signal.limit) for step in range(1, by_step + 1))


# Comparisons: differences of two arms over the seeds that both have.


def paired(
    results: Mapping[str, Any], cell: str, arm: str, other: str = "identical", of: Callable[[Any], float] = area
) -> np.ndarray:
    """[seeds] how much higher the first arm is."""
    rates = chosen_rates(results, cell)
    names = [[Experiment(cell, a, rates[a], seed).name for a in (arm, other)] for seed in range(SEEDS) if rates]
    return np.array([of(results[a]) - of(results[b]) for a, b in names if a in results and b in results])


def resampled(differences: np.ndarray) -> np.ndarray:
    """[10,000] means of bootstrap samples."""
    chosen = np.random.default_rng(0).integers(len(differences), size=(10_000, len(differences)))
    return np.asarray(differences[chosen].mean(1))


def interval(differences: np.ndarray) -> str:
    """The mean, and its 95% interval by a paired bootstrap."""
    if not len(differences):
        return ""
    low, high = np.quantile(resampled(differences), [0.025, 0.975])
    return f"{differences.mean():+.3f} ({low:+.3f} to {high:+.3f})"


def above(differences: np.ndarray, bound: float = 0.0) -> float:
    """The p of a mean above the bound by chance: the share of all sign changes with as high a mean."""
    centred = differences - bound
    signs = np.array([*product((1, -1), repeat=len(centred))])
    return float(((signs * centred).mean(1) >= centred.mean() - 1e-12).mean())


def outside(differences: np.ndarray, bound: float) -> float:
    """The share of bootstrap means that are further from 0 than the bound."""
    return float((np.abs(resampled(differences)) > bound).mean())


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis of the page."""

    name: str
    p: Callable[[Mapping[str, Any]], float]
    """How probable such results are if it is false."""
    seen: Callable[[Mapping[str, Any]], str]


SHORT, LONG = "errand, 5 calls, 1%", "errand, 40 calls, 1%"
RARE, OFTEN = "errand, 20 calls, 0.5%", "errand, 20 calls, 10%"
FARM, MISLEADING, WALK, LUCK = [*CELLS][4:8]


def _growth(results: Mapping[str, Any]) -> np.ndarray:
    long, short = paired(results, LONG, "air"), paired(results, SHORT, "air")
    count = min(len(long), len(short))
    return long[:count] - short[:count]


def _ends(results: Mapping[str, Any], arm: str) -> np.ndarray:
    return np.array(values_of(results, FARM, arm, after))


def _alarms(results: Mapping[str, Any]) -> list[bool]:
    arms = ("air", "air, mixed")
    return [bool(f) for arm in arms for f in values_of(results, MISLEADING, arm, lambda r: fired(r, by_step=5))]


OTHERS = [arm for arm in ARMS if arm not in ("identical", "immediate")]
"""The rules that may be as good as `identical`; `immediate` is the negative control."""

HYPOTHESES = (
    Hypothesis("H1", lambda r: above(paired(r, RARE, "air"), 0.15), lambda r: interval(paired(r, RARE, "air"))),
    Hypothesis("H2", lambda r: outside(paired(r, OFTEN, "air"), 0.06), lambda r: interval(paired(r, OFTEN, "air"))),
    Hypothesis("H3", lambda r: above(_growth(r)), lambda r: interval(_growth(r))),
    Hypothesis(
        "H4",
        lambda r: max(above(0.05 - _ends(r, "air, mixed")), above(paired(r, FARM, "air", of=after), -0.03)),
        lambda r: f"{_ends(r, 'air, mixed').mean():.3f}; {interval(paired(r, FARM, 'air', of=after))}",
    ),
    Hypothesis(
        "H5",
        lambda r: max(above(-paired(r, MISLEADING, arm)) for arm in ("air", "air, mixed")),
        lambda r: "; ".join(
            [
                *(interval(paired(r, MISLEADING, arm)) for arm in ("air", "air, mixed")),
                f"alarm in {sum(_alarms(r))} of {len(_alarms(r))} runs",
            ]
        ),
    ),
    Hypothesis(
        "H6",
        lambda r: max(above(paired(r, WALK, "air"), 0.05), outside(paired(r, WALK, "gigpo"), 0.03)),
        lambda r: "; ".join(interval(paired(r, WALK, arm)) for arm in ("air", "gigpo")),
    ),
    Hypothesis(
        "H7",
        lambda r: max(outside(paired(r, LUCK, arm), 0.03) for arm in OTHERS),
        lambda r: "; ".join(f"{arm} {interval(paired(r, LUCK, arm))}" for arm in OTHERS),
    ),
)


def holm(values: Sequence[float]) -> list[float]:
    """Adjusted for as many tests (Holm, 1979).

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [1.0] * len(values), 0.0
    for rank, i in enumerate(np.argsort(values).tolist()):
        largest = max(largest, min(1.0, values[i] * (len(values) - rank)))
        adjusted[i] = largest
    return adjusted


# The page.


def tables(results: Mapping[str, Any]) -> Iterator[str]:
    seeds = len(paired(results, LUCK, [*ARMS][-1]))
    if not seeds:
        yield f"*{len(results)} runs are made, too few for tables.*"
        return
    chosen = [rates for cell in (LUCK, TEXTWORLD) if (rates := chosen_rates(results, cell))]
    smaller = (", ".join(arm for arm, rate in rates.items() if rate == min(rates.values())) for rates in chosen)
    textworld = len(values_of(results, TEXTWORLD, "identical", area))
    yield f"Seeds: {seeds} and {textworld} of {SEEDS}. Smaller step size: {'; on TextWorld '.join(smaller)}."
    yield from ("", "| | seen | p | Holm | holds |", "|---|---|---|---|---|")
    values = [hypothesis.p(results) for hypothesis in HYPOTHESES]
    for hypothesis, p, adjusted in zip(HYPOTHESES, values, holm(values), strict=True):
        holds = "yes" if adjusted < 0.05 else "no"
        yield f"| **{hypothesis.name}** | {hypothesis.seen(results)} | {p:.3f} | {adjusted:.3f} | {holds} |"
    won = by_success(results)
    for title, of in (("area under the training reward", area), ("reward after, held-out", after)):
        yield from ("", f"| {title} | {' | '.join(ARMS)} |", "|---" * (len(ARMS) + 1) + "|")
        for cell in won:
            means = (values_of(results, cell, arm, of) for arm in ARMS)
            yield f"| {cell} | {' | '.join(f'{fmean(each):.2f}' if each else '' for each in means)} |"
    shares = ", ".join(f"{100 * share:.2g}" for share in won.values())
    yield from ("", f"Won before, exactly (on TextWorld in the first steps), in this order: {shares}%.")
    if all(e.name in results for e in explored()):
        yield from ("", f"Tried afterwards, {LONG}, step size {RATES[0]:g}, six seeds: {afterwards(results)}.")


def afterwards(results: Mapping[str, Any]) -> str:
    air, identical = ([results[e.name] for e in explored() if e.arm == arm] for arm in ("air", "identical"))
    gain = interval(np.array([area(one) - area(other) for one, other in zip(air, identical, strict=True)]))
    return f"area of `air` above `identical` by {gain}, and no run ended below {min(map(after, air)):.2f}"


def by_success(results: Mapping[str, Any]) -> dict[str, float]:
    """The cells from the rarest success before training; of TextWorld, the mean of all first steps."""
    won = {cell: results[before(cell)]["won"] for cell in CELLS if before(cell) in results}
    if firsts := values_of(results, TEXTWORLD, "identical", lambda result: result["rewards"][0]):
        won[TEXTWORLD] = fmean(firsts)
    return dict(sorted(won.items(), key=lambda item: item[1]))


def values_of(results: Mapping[str, Any], cell: str, arm: str, of: Callable[[Any], float]) -> list[float]:
    rate = chosen_rates(results, cell).get(arm, 0.0)
    names = [Experiment(cell, arm, rate, seed).name for seed in range(SEEDS)]
    return [of(results[name]) for name in names if name in results]


def figure(results: Mapping[str, Any]) -> str:
    """Rollouts to half, medians over seeds; cells are in the order of `by_success`. What never comes has no point."""
    cells = [*by_success(results)]
    lines = {
        arm: [
            (place, float(np.median(rollouts)))
            for place, cell in enumerate(cells, 1)
            if (rollouts := values_of(results, cell, arm, rollouts_to_half))
        ]
        for arm in ARMS
    }
    chart = line_chart("rollouts to half, by cells from the rarest success", "", lines, wide=True)
    return picture([chart], (640, 260)) if chart else ""


def quick() -> None:
    """H1 and H4 with three arms and three seeds; exits with 1 if what they say is not so."""
    experiments = [
        Experiment(cell, arm, RATES[1], seed) for seed in range(3) for cell in (RARE, FARM) for arm in QUICK_ARMS
    ]
    results = dict(in_parallel(experiments))

    def mean(cell: str, arm: str, of: Callable[[Any], float]) -> float:
        value = fmean(of(result) for e, result in results.items() if (e.cell, e.arm) == (cell, arm))
        print(f"{cell}, {arm}: {of.__name__} {value:.3f}")
        return value

    gain = mean(RARE, "air", area) - mean(RARE, "identical", area)
    farmed = mean(FARM, "air, mixed", after)
    kept = mean(FARM, "air", after) - mean(FARM, "identical", after)
    sys.exit(0 if gain > 0 and kept > -0.03 and farmed < mean(FARM, "air", after) else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="H1 and H4 alone, three arms and three seeds")
    parser.add_argument("--write", action="store_true", help="write the page from the results there are")
    options = parser.parse_args()
    if options.quick:
        quick()
    if not options.write:
        complete()
    text = "\n".join(tables(read()))
    FIGURE.write_text(figure(read()))
    PAGE.write_text(replaced(PAGE.read_text(), "docs/make_credit.py", f"\n{text}\n"))


if __name__ == "__main__":
    main()
