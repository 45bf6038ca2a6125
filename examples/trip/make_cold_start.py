"""The cold start: a policy that never succeeds learns from demonstrations, then from its best rollouts, then explores.

    python examples/trip/make_cold_start.py     # make cold-start

With three seeds, the same untaught policy is trained in two ways:

- SFT on 50 demonstrations, then RFT, which imitates the rollouts that succeeded, then GRPO;
- GRPO alone, for as many rollouts as RFT and GRPO have.

Results go to `cold_start.json`, `cold_start.svg` and the table in README.md beside this file; the runs are in
`runs/cold-start`.

The untaught policy is in `untaught/`. It can read and write, and knows the tools: it was trained on errands, of which
the user names one at a time ("Which airline do I fly with?", "What is it to Rome?"), and on travellers whose flight is
cancelled, for whom it tries in vain and gives up. It has never seen anyone find out what another flight costs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent
sys.path[:0] = [str(HERE), str(EXAMPLES), str(EXAMPLES.parent / "tests" / "benchmarks")]

from make_policy import teach, write_random  # noqa: E402
from make_trip import RECIPE, Choice, Situation, Told, behave, lesson  # noqa: E402
from measured import Experiment, Result, average, spread, table  # noqa: E402
from recipes import Demonstrations, Message, chooser, opened, says  # noqa: E402
from seeds import curves, picture  # noqa: E402
from tables import replaced  # noqa: E402
from trip_tools import SYSTEM_PROMPT, TOOLS  # noqa: E402
from trips import Split, traveller, trip  # noqa: E402

SEEDS = range(3)
UNTAUGHT, UNTAUGHT_STEPS = HERE / "untaught", 2000
ERRANDS = 3
DEMONSTRATIONS = 50
RUNS = Path("runs/cold-start").resolve()
RESULTS = HERE / "cold_start.json"

HOPELESS = {
    Situation.ASKED: {Choice.SEARCH_EVERYWHERE: 0.5, Choice.CALCULATE_WORDS: 0.5},
    Situation.FAILED: {
        Choice.SEARCH_EVERYWHERE: 0.3,
        Choice.CALCULATE_WORDS: 0.3,
        Choice.ASK_SEAT: 0.1,
        Choice.GUESS: 0.3,
    },
}
"""How often each choice is made by an assistant that never finds anything out."""

RFT_STEPS, GRPO_STEPS = 5, 12
RATE = "policies.default.optimizer.learning_rate"
ROLLOUTS = ("eval.tasks=40", "train.groups_per_step=4", "train.group_size=8")
STAGES: dict[str, tuple[str, ...]] = {
    # 16 passes over the demonstrations, ten in a step.
    "SFT": (
        *("algorithm.name=sft", f"{RATE}=1e-3", "eval.tasks=40"),
        *("train.steps=80", "train.groups_per_step=10", "train.group_size=1"),
    ),
    "RFT": ("algorithm.name=rft", "algorithm.rft.threshold=1", f"{RATE}=1e-3", f"train.steps={RFT_STEPS}", *ROLLOUTS),
    "GRPO": (f"{RATE}=3e-4", f"train.steps={GRPO_STEPS}", *ROLLOUTS),
    "GRPO alone": (f"{RATE}=3e-4", f"train.steps={RFT_STEPS + GRPO_STEPS}", *ROLLOUTS),
}
"""What is changed in train.toml."""
WAYS = ("SFT", "RFT", "GRPO"), ("GRPO alone",)


def errands(seed: int, index: int) -> list[Message]:
    """A user who asks for one thing after the other, in any order, and may refer to what was found out."""
    rng = random.Random(f"errands/{seed}/{index}")
    task, known = trip(f"{Split.TRAIN}/errands-{seed}/{index}"), Told()
    messages = opened(SYSTEM_PROMPT, "")[:1]
    for _ in range(ERRANDS):
        airline, fare, refund = (
            brief if is_known and rng.random() < 0.6 else f"{word} {value}"
            for is_known, brief, word, value in (
                (known.airline, "it", "airline", task.airline),
                (known.fare, "fare", "fare", task.fare),
                (known.refund, "refund", "refund", task.refund),
            )
        )
        question, choice, answer = rng.choice(
            (
                ("Which airline do I fly with?", Choice.ASK_AIRLINE, "You fly with {}."),
                ("What do I get back?", Choice.ASK_REFUND, "You get {}."),
                (f"What is {airline} to {task.city}?", Choice.SEARCH_AIRLINE, "You pay {}."),
                (f"What is {airline} to {task.city}?", Choice.SEARCH_CITY, "You pay {}."),
                (f"What is {fare} - {refund}?", Choice.SUBTRACT, "It is {}."),
                (f"What is {fare} - {refund}?", Choice.SUBTRACT, "It is {}."),
            )
        )
        messages += [{"role": "user", "content": question}, *known.ask(choice, task)]
        messages.append(says(answer.format(known.output)))
    return messages


def untaught(seed: int, index: int) -> list[Message]:
    """Errands and travellers who are not helped, in turn."""
    if index % 2:
        return errands(seed, index)
    return behave(trip(traveller(Split.TRAIN, -1 - seed, index)), chooser(f"hopeless/{seed}/{index}", HOPELESS))


def make_untaught() -> None:
    """Make the policy of `UNTAUGHT` again, with the tokenizer of the example's own."""
    recipe = replace(RECIPE, shown=Demonstrations(untaught, TOOLS, errands), steps=UNTAUGHT_STEPS, reading=0.6)
    with tempfile.TemporaryDirectory() as random_weights:
        write_random(RECIPE, 0, Path(random_weights))
        teach(HERE, recipe, 0, Path(random_weights), UNTAUGHT)


def one_way(way: Sequence[str], seed: int) -> dict[str, Result]:
    """The result of each stage, the first of which begins with the untaught policy."""
    results, policy = {}, UNTAUGHT
    for stage in way:
        runs = RUNS / f"{stage.replace(' ', '-')}-{seed}"
        runs.mkdir(parents=True)
        changes = [*STAGES[stage], f"policies.default.model.path={policy}"]
        if stage == "SFT":
            file = runs / "demonstrations.jsonl"
            lines = [{"messages": lesson(seed, index), "tools": TOOLS} for index in range(DEMONSTRATIONS)]
            file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            changes.append(f'tasks.train={{source="recorded", run="{file}"}}')
        results[stage] = Experiment(HERE, stage, tuple(changes), seed).run(runs)
        print(f"seed {seed}, {stage}:", results[stage]["rewards"]["eval"], file=sys.stderr, flush=True)
        policy = max(runs.glob("*/checkpoints/step-*")) / "default" / "model"
    return results


def show(results: Sequence[dict[str, Result]]) -> None:
    """Draw success in training against rollouts, and write success on held-out trips into README.md."""
    seeds = {
        stage: [list(enumerate(of_seed[stage]["train_rewards"], first)) for of_seed in results]
        for stage, first in {"RFT": 1, "GRPO": RFT_STEPS + 1, "GRPO alone": 1}.items()
    }
    (HERE / "cold_start.svg").write_text(picture([curves("success in training, by steps of 32 rollouts", seeds)]))
    rows = {stage: [of_seed[stage] for of_seed in results] for stage in STAGES}
    columns = {
        f"{mode}, {when}": spread(lambda run, when=when, mode=mode: run["rewards"]["eval"][when][mode])
        for mode in ("greedy", "sampled")
        for when in ("before", "after")
    } | {"CPU seconds a run": average(lambda run: run["cpu_seconds"])}
    page = HERE / "README.md"
    drawing = "![Success in training of RFT, of GRPO after it, and of GRPO alone](cold_start.svg)"
    text = "\n".join(["", *table("run", rows, columns), "", drawing, ""])
    page.write_text(replaced(page.read_text(), "make_cold_start.py", text))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a policy that never succeeds.")
    parser.add_argument("--untaught", action="store_true", help="only make the policy again that the runs begin with")
    parser.add_argument("--write", action="store_true", help="only write the table and the picture of the results here")
    options = parser.parse_args()
    if options.untaught:
        make_untaught()
        return
    if not options.write:
        os.environ["OMP_NUM_THREADS"] = "1"  # Two runs share two cores.
        shutil.rmtree(RUNS, ignore_errors=True)
        with ProcessPoolExecutor(2) as pool:
            ended = [[pool.submit(one_way, way, seed) for seed in SEEDS] for way in WAYS]
        results = [{**taught.result(), **alone.result()} for taught, alone in zip(*ended, strict=True)]
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    show(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
