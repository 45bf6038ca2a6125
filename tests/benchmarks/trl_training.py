"""SmolLM2-135M trained on the same tasks by agl and by TRL, over several seeds.

    make bench-trl        python tests/benchmarks/trl_training.py [--write]

Both train on `chain_sum` (sums and differences of two or three digits) from the same weights. Both sample a group for
each task at temperature 1, give 1 for a reply whose last number is the answer, and take one step of AdamW with GRPO's
advantages, without a KL term, in float32 on one thread. How they do it is their own. CPU seconds are those of the whole
command, its start included; neither evaluates in them. Afterwards one program asks the initial model and both trained
ones the same held-out tasks, greedily. The random numbers of the two differ, so single runs do too. A seed takes about
forty minutes of a free core. Finished runs stay in the folder, and are not run again.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import tomli_w
from openai import AsyncOpenAI
from tables import machine, table, write

from agl_rewards.reasoning import ReasoningGymOptions, ReasoningGymTasks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MEMBERS = 8
"""Rollouts of a group."""
Figures = Mapping[str, float]


def kept(folder: Path, name: str, measure: Callable[[], Figures]) -> Figures:
    """The figures of a run, measured now or before an interruption."""
    file = folder / f"{name}.json"
    if not file.exists():
        shutil.rmtree(folder / "runs" / name, ignore_errors=True)  # It was interrupted.
        file.write_text(json.dumps(measure()))
    return dict(json.loads(file.read_text()))


def run(folder: Path, name: str, *command: str | Path) -> float:
    """The CPU seconds of a command and of every process it started."""
    path = [str(HERE), str(ROOT / "rewards"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = folder / f"{name}.log"
    with log.open("w") as output:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        sys.exit(f"{name} failed or was interrupted:\n{log.read_text()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def train(folder: Path, name: str, *arguments: str | Path) -> tuple[list[dict[str, Any]], float]:
    """The metrics of each step of a run by agl, and its CPU seconds."""
    seconds = run(folder, name, Path(sys.executable).with_name("agl"), "train", *arguments)
    lines = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"], seconds


def span(runs: Sequence[Figures], name: str, form: str) -> str:
    """The mean, and the range."""
    values = [figures[name] for figures in runs]
    return f"{mean(values):{form}} ({min(values):{form}}–{max(values):{form}})"


MODEL = ROOT / "examples" / "smollm" / "policy"
TRL = ROOT / ".venv-oracles" / "bin" / "python"
STEPS, GROUPS, MAX_TOKENS, HELD_OUT, LEARNING_RATE = 20, 8, 16, 128, 2e-5
LAST = 5
"""Steps at the end, and at the beginning, whose mean reward is shown."""
DATASET: dict[str, Any] = {
    "dataset": "chain_sum",
    "settings": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
}


@functools.cache
def client() -> AsyncOpenAI:
    return AsyncOpenAI()


async def solve(question: str) -> str:
    """The agent that agl trains: one call on the plain openai client."""
    message = {"role": "user", "content": question}
    reply = await client().chat.completions.create(model="default", messages=[message])
    return reply.choices[0].message.content or ""


def train_agl(folder: Path, name: str, seed: int) -> Figures:
    optimizer, model = {"learning_rate": LEARNING_RATE}, {"path": str(MODEL), "dtype": "float32"}
    steps = {"steps": STEPS, "groups_per_step": GROUPS, "group_size": MEMBERS, "checkpoint_every": STEPS}
    config = {
        "config_version": 1,
        "name": name,
        "seed": seed,
        "agent": {"entry": "trl_training:solve"},
        "tasks": {"train": {"source": "reasoning_gym", **DATASET}},
        "policies": {"default": {"model": model, "optimizer": optimizer}},
        "sampling": {"max_tokens": MAX_TOKENS},
        "train": steps,
        "rewards": {"answer": {"rule": "numeric_match", "field": "answer"}},
        "algorithm": {"name": "grpo", "grpo": {"beta": 0, "aggregation": "token-mean"}},
        "engine": {"name": "torch", "torch": {"threads": 1, "max_context": 256}},
    }
    file = folder / f"{name}.toml"
    file.write_text(tomli_w.dumps(config))
    lines, seconds = train(folder, name, file)
    (trained,) = (folder / "runs" / name / "checkpoints").glob("*/default/model")
    figures = figures_of([line["reward/mean"] for line in lines], seconds, greedy(folder, name, trained))
    shutil.rmtree(folder / "runs" / name)  # 1.6 GB
    return figures


def train_trl(folder: Path, name: str, seed: int) -> Figures:
    out = folder / f"{name}-model"
    asked = {"steps": STEPS, "groups": GROUPS, "members": MEMBERS, "learning_rate": LEARNING_RATE, "seed": seed}
    drawn = tasks("train", STEPS * GROUPS, seed)
    rewards, seconds = ask_trl(folder, name, "train", model=str(MODEL), out=str(out), tasks=drawn, **asked)
    figures = figures_of(rewards, seconds, greedy(folder, name, out))
    shutil.rmtree(out)
    return figures


def figures_of(rewards: Sequence[float], seconds: float, greedy: float) -> Figures:
    return {"first": mean(rewards[:LAST]), "last": mean(rewards[-LAST:]), "seconds": seconds, "greedy": greedy}


def greedy(folder: Path, name: str, model: Path) -> float:
    """The reward of a model on the held-out tasks."""
    held_out = tasks("eval", HELD_OUT, 0)
    reward, _ = ask_trl(folder, f"{name}-eval", "evaluate", model=str(model), tokenizer=str(MODEL), tasks=held_out)
    return float(reward)


def ask_trl(folder: Path, name: str, work: str, **settings: Any) -> tuple[Any, float]:
    """What `trl_side.py` makes of the settings, and its CPU seconds."""
    file = folder / f"{name}.settings"
    file.write_text(json.dumps({"max_tokens": MAX_TOKENS, **settings}))
    seconds = run(folder, name, TRL, HERE / "trl_side.py", work, file)
    return json.loads(file.with_suffix(".result").read_text()), seconds


def tasks(split: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Question and answer of each, as agl's own source draws them."""
    source = ReasoningGymTasks(ReasoningGymOptions.model_validate({"split": split, **DATASET}), Path(), seed)
    drawn = [source.task(index) for index in range(count)]
    return [(str(task.input), str(task.metadata["answer"])) for task in drawn]


def compare(folder: Path, seeds: int) -> str:
    """The table."""
    before = greedy(folder, "untrained", MODEL)
    version = [TRL, "-c", "import trl; print('TRL', trl.__version__)"]
    names = {"agl": "agl", "trl": subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip()}
    rows = []
    for trainer, measure in (("agl", train_agl), ("trl", train_trl)):
        runs = [
            kept(folder, f"{trainer}-{seed}", functools.partial(measure, folder, f"{trainer}-{seed}", seed))
            for seed in range(seeds)
        ]
        parts = [span(runs, name, ".2f") for name in ("greedy", "first", "last")]
        parts.append(span(runs, "seconds", ",.0f"))
        rows.append(f"{names[trainer]} | {seeds} | {before:.2f} | {' | '.join(parts)}")
    head = f"trainer | seeds | greedy before | greedy after | first {LAST} steps | last {LAST} steps | CPU seconds"
    return (
        f"{table(head, rows)}\n\n{STEPS} steps of {GROUPS} groups of {MEMBERS}, {MAX_TOKENS} new tokens, "
        f"learning rate {LEARNING_RATE:g}; {HELD_OUT} held-out tasks; means over the seeds, with the range. "
        f"{time.strftime('%B %Y')}, one thread of: {machine()}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, …")
    parser.add_argument("--folder", type=Path, default=ROOT / ".bench-trl", help="where the runs go")
    parser.add_argument("--write", action="store_true", help="put the table into docs/compare.md")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    text = compare(folder, options.seeds)
    print(text)
    if options.write:
        write("compare.md", Path(__file__).name, text)


if __name__ == "__main__":
    main()
