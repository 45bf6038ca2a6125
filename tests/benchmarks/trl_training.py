"""SmolLM2-135M on reasoning-gym, trained by agl and by TRL: the same model, tasks, groups, steps and learning rate.

    make bench-trl

trains `chain_sum` (sums and differences of two or three digits) from the same weights by both, once with each seed.
Both sample a group for each task at temperature 1, give 1 for a reply whose last number is the answer, and take one
step of AdamW with GRPO's advantages, without a KL term, in float32 on one thread. How they do it is their own. CPU
seconds are those of the whole command, its start included; neither evaluates in them. Afterwards one program asks the
initial model and both trained ones the same held-out tasks, greedily. `--write` puts the table into docs/compare.md.

The random numbers of the two differ, so single runs do too. It can be interrupted: what `--folder` has is not run
again. A seed takes about forty minutes of a free core.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import tomli_w
from openai import AsyncOpenAI
from tables import machine, table, write

from agl_rewards.reasoning import ReasoningGymOptions, ReasoningGymTasks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MEMBERS, MAX_TOKENS, HELD_OUT = 8, 16, 128
LEARNING_RATE = 2e-5
DATASET: dict[str, Any] = {
    "dataset": "chain_sum",
    "settings": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
}
LAST = 5
"""Steps at the end whose mean reward is shown."""


@dataclass(frozen=True)
class Measured:
    """One run."""

    rewards: list[float]
    """Of each step."""
    cpu_seconds: float
    greedy: float
    """On the held-out tasks, afterwards."""


@dataclass(frozen=True)
class Bench:
    """Where everything is, and how long the runs are."""

    folder: Path
    model: Path
    trl: Path
    """The Python of the environment that has TRL."""
    steps: int
    groups: int

    def kept(self, trainer: str, seed: int) -> Measured:
        """What was measured with this seed, now or before an interruption."""
        file = self.folder / f"{trainer}-{seed}.json"
        if not file.exists():
            train = self.train_agl if trainer == "agl" else self.train_trl
            file.write_text(json.dumps(asdict(train(seed))))
        return Measured(**json.loads(file.read_text()))

    def train_agl(self, seed: int) -> Measured:
        name = f"agl-{seed}"
        shutil.rmtree(self.folder / "runs" / name, ignore_errors=True)  # It was interrupted.
        config = {
            "config_version": 1,
            "name": name,
            "seed": seed,
            "agent": {"entry": "trl_training:solve"},
            "tasks": {"train": {"source": "reasoning_gym", **DATASET}},
            "policies": {
                "default": {
                    "model": {"path": str(self.model), "dtype": "float32"},
                    "optimizer": {"learning_rate": LEARNING_RATE},
                }
            },
            "sampling": {"max_tokens": MAX_TOKENS},
            "train": {
                "steps": self.steps,
                "groups_per_step": self.groups,
                "group_size": MEMBERS,
                "checkpoint_every": self.steps,
            },
            "rewards": {"answer": {"rule": "numeric_match", "field": "answer"}},
            "algorithm": {"name": "grpo", "grpo": {"beta": 0, "aggregation": "token-mean"}},
            "engine": {"name": "torch", "torch": {"threads": 1, "max_context": 256}},
        }
        file = self.folder / f"{name}.toml"
        file.write_text(tomli_w.dumps(config))
        seconds = self.run(name, Path(sys.executable).with_name("agl"), "train", file)
        lines = [json.loads(line) for line in (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        rewards = [line["reward/mean"] for line in lines if line["kind"] == "train"]
        (model,) = (self.folder / "runs" / name / "checkpoints").glob("*/default/model")
        measured = Measured(rewards, seconds, self.greedy(name, model))
        shutil.rmtree(self.folder / "runs" / name)  # 1.6 GB
        return measured

    def train_trl(self, seed: int) -> Measured:
        name, out = f"trl-{seed}", self.folder / f"trl-{seed}-model"
        settings = self.folder / f"{name}.settings"
        drawn = tasks(ReasoningGymOptions(**DATASET), self.steps * self.groups, seed)
        asked = {
            "model": str(self.model),
            "out": str(out),
            "seed": seed,
            "steps": self.steps,
            "groups": self.groups,
            "members": MEMBERS,
            "max_tokens": MAX_TOKENS,
            "learning_rate": LEARNING_RATE,
            "tasks": drawn,
        }
        settings.write_text(json.dumps(asked))
        seconds = self.run(name, self.trl, HERE / "trl_side.py", "train", settings)
        rewards = json.loads(settings.with_suffix(".result").read_text())
        measured = Measured(rewards, seconds, self.greedy(name, out))
        shutil.rmtree(out)
        return measured

    def greedy(self, name: str, model: Path) -> float:
        """The reward of a model on the held-out tasks."""
        settings = self.folder / f"{name}-eval.settings"
        held_out = tasks(ReasoningGymOptions(split="eval", **DATASET), HELD_OUT, 0)
        asked = {"model": str(model), "tokenizer": str(self.model), "max_tokens": MAX_TOKENS, "tasks": held_out}
        settings.write_text(json.dumps(asked))
        self.run(f"{name}-eval", self.trl, HERE / "trl_side.py", "evaluate", settings)
        return float(json.loads(settings.with_suffix(".result").read_text()))

    def run(self, name: str, *command: str | Path) -> float:
        """The CPU seconds of a command and of every process it started."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT / "rewards")]),
            "TOKENIZERS_PARALLELISM": "false",
        }
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with (self.folder / f"{name}.log").open("w") as log:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
            )
        if done.returncode:
            sys.exit(f"{name} failed:\n{(self.folder / f'{name}.log').read_text()}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def tasks(options: ReasoningGymOptions, count: int, seed: int) -> list[tuple[str, str]]:
    """Question and answer of each, as agl's own source draws them."""
    source = ReasoningGymTasks(options, Path(), seed)
    drawn = [source.task(index) for index in range(count)]
    return [(str(task.input), str(task.metadata["answer"])) for task in drawn]


HEAD = "trainer | seeds | greedy before | greedy after | first {last} steps | last {last} steps | CPU seconds"


def row(name: str, before: float, runs: Sequence[Measured]) -> str:
    def span(value: Callable[[Measured], float], form: str) -> str:
        values = [value(run) for run in runs]
        return f"{mean(values):{form}} ({min(values):{form}}–{max(values):{form}})"

    parts = [
        span(lambda run: run.greedy, ".2f"),
        span(lambda run: mean(run.rewards[:LAST]), ".2f"),
        span(lambda run: mean(run.rewards[-LAST:]), ".2f"),
        span(lambda run: run.cpu_seconds, ",.0f"),
    ]
    return f"{name} | {len(runs)} | {before:.2f} | {' | '.join(parts)}"


@functools.cache
def client() -> AsyncOpenAI:
    return AsyncOpenAI()


async def solve(question: str) -> str:
    """The agent that agl trains: one call on the plain openai client."""
    message = {"role": "user", "content": question}
    reply = await client().chat.completions.create(model="default", messages=[message])
    return reply.choices[0].message.content or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="made by examples/smollm/fetch.py")
    parser.add_argument("--trl", type=Path, default=ROOT / ".venv-oracles" / "bin" / "python", help="TRL's Python")
    parser.add_argument("--folder", type=Path, required=True, help="where the runs go")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8, help=f"groups of a step, of {MEMBERS} rollouts each")
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, …")
    parser.add_argument("--write", action="store_true", help="put the table into docs/compare.md")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder, options.model.resolve(), options.trl.absolute(), options.steps, options.groups)
    runs = {trainer: [bench.kept(trainer, seed) for seed in range(options.seeds)] for trainer in ("agl", "trl")}
    before = bench.greedy("untrained", bench.model)
    versions = subprocess.run(
        [bench.trl, "-c", "import trl; print(trl.__version__)"], capture_output=True, text=True, check=True
    )
    rows = [row("agl", before, runs["agl"]), row(f"TRL {versions.stdout.strip()}", before, runs["trl"])]
    text = (
        f"{table(HEAD.format(last=LAST), rows)}\n\n{options.steps} steps of {options.groups} groups of {MEMBERS}, "
        f"{MAX_TOKENS} new tokens, learning rate {LEARNING_RATE:g}; {HELD_OUT} held-out tasks; means over the seeds, "
        f"with the range. {time.strftime('%B %Y')}, one thread of: {machine()}."
    )
    print(text)
    if options.write:
        write("compare.md", Path(__file__).name, text)


if __name__ == "__main__":
    main()
