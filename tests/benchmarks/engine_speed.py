"""How fast the torch engine is, beside other ways of doing the same.

    python tests/benchmarks/engine_speed.py sampling [--large]
    python tests/benchmarks/engine_speed.py update [--large]
    python tests/benchmarks/engine_speed.py step

*sampling*: 16 prompts of 60 tokens, 8 responses of 32 tokens each, all at once, by the engine's sampler and by
transformers' own `generate`. Both draw from the whole distribution; the sampler also gives the log-probability of every
token.

*update*: forward and backward passes over the same transitions in two layouts. In rows, each rollout is one causal row,
which is what one concatenated sequence costs. In trees, rollouts of a group are one tree wherever that is expected to
pay. Both give the same loss and gradient, to rounding.

*step*: a step of GRPO by the engine: sampling 16 · 8 replies, scoring them, and one update.

These times are CPU seconds of one thread, the best of some rounds that alternate, so that other programs disturb the
ratio little. `--large` adds a model of 135M parameters (4 GiB, minutes).

    python tests/benchmarks/engine_speed.py async [--seeds N] [--folder FOLDER] [--write]

*async*: the calc example is trained from the same weights on the same tasks twice with each seed, once with
`async.max_staleness = 0` and once with 4. Its tool sleeps before it answers: log-normal, a second at the median, the
slowest hundredth at least ten times as long, and as long for the same call of the same rollout in both. All rollouts of
a synchronous step can run at once, so it waits for nothing but its slowest; the other run has no more workers. The
engine has one thread, so CPU seconds per wall-clock second say how busy it was. Times are of training alone, without
start and evaluations. Unless the second runs make twice the rollouts per hour and end with no worse a reward, on
average over the seeds, the exit status is 1. Needs a quiet machine; takes about thirteen minutes a seed. With
`--folder` it can be interrupted: the same command goes on with what is missing. `--quick` only shows that it works.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import psutil
import torch
from tables import machine, table, write
from transformers import LlamaConfig, LlamaForCausalLM

from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import GrpoOptions
from agl_core.config.sections import OptimizerSection
from agl_core.types import Batch, CreditKind, TransitionKey
from agl_torch import attention
from agl_torch.serving.requests import Request, Response
from agl_torch.serving.sampler import Sampler
from agl_torch.training.batching import Limits, micro_batches, score
from agl_torch.training.trainer import PolicyTrainer

SMALL, LARGE = "0.9M", "135M"
MODELS = {
    SMALL: {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "heads": 4},
    LARGE: {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "heads": 9},
}
PROMPTS, GROUP, PROMPT, RESPONSE = 16, 8, 60, 32
SHAPES = {
    "one turn, prompt 60, response 16": (60, 16, 0, 1),
    "six turns, prompt 200, response 40, observation 60": (200, 40, 60, 6),
    "six turns, prompt 1000, response 40, observation 60": (1000, 40, 60, 6),
}
LEARNING_RATE, STEPS = 1e-5, 5
TOKENS_PER_PASS = {SMALL: 16_384, LARGE: 4096}


@dataclass(frozen=True)
class Loaded:
    """A model with random weights that never ends a response, as sampler and trainer want it."""

    model: Any
    vocabulary: int
    size: int
    device: torch.device
    eos_ids: frozenset[int] = frozenset()
    context_length: int = 256
    tokenizer: Any = None
    dtype: torch.dtype = torch.float32
    has_adapter: bool = False


def make_model(vocab_size: int, hidden_size: int, heads: int, **shape: int) -> Any:
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 3), max_position_embeddings=4096, tie_word_embeddings=True,
        attn_implementation="sdpa", **shape,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def loaded(name: str) -> Loaded:
    model = make_model(**MODELS[name]).eval()
    attention.use(model)
    size = sum(weights.numel() for weights in model.parameters())
    return Loaded(model, model.config.vocab_size, size, torch.device("cpu"))


def make_prompts(vocabulary: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, vocabulary, PROMPT).astype(np.int32) for _ in range(PROMPTS)]


def best_of(rounds: int, ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The least CPU seconds of each way, in alternating rounds."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for way, run in ways.items():
            started = time.process_time()
            run()
            best[way] = min(best[way], time.process_time() - started)
    return best


def sample(sampler: Sampler, prompts: list[Any], seed: int = 0) -> list[tuple[Response, ...]]:
    """The replies to each prompt."""
    sampler.new_version(sampler.version + 1)  # Nothing cached is left of the round before.
    for number, prompt in enumerate(prompts):
        sampler.submit(Request(str(number), prompt, max_tokens=RESPONSE, n=GROUP, seed=seed))
    replies: dict[int, tuple[Response, ...]] = {}
    while not sampler.idle:
        replies |= {int(generated.request.id): generated.responses for generated in sampler.step()}
    return [replies[number] for number in range(len(prompts))]


@torch.inference_mode()
def generate(model: Any, prompts: list[Any]) -> None:
    rows = torch.from_numpy(np.stack(prompts)).long()
    options = {"do_sample": True, "top_k": 0, "num_return_sequences": GROUP, "pad_token_id": 0, "eos_token_id": None}
    model.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=RESPONSE, **options)


def sampling(models: Sequence[str]) -> Iterator[str]:
    for name in models:
        plain, model = make_model(**MODELS[name]).eval(), loaded(name)
        prompts = make_prompts(model.vocabulary)
        ways = {"generate": partial(generate, plain, prompts), "sampler": partial(sample, Sampler(model), prompts)}
        best = best_of(5 if name == SMALL else 2, ways)
        ratio = best["generate"] / best["sampler"]
        yield f"{name} | {best['generate']:.2f} | {best['sampler']:.2f} | {ratio:.2f}"


def batch_of(prompts: Sequence[Any], replies: Sequence[Any]) -> Batch:
    """All of one group, with nothing but their tokens; replies are equally long."""
    count, response = len(prompts), len(replies[0])
    tokens = [np.concatenate(both) for both in zip(prompts, replies, strict=True)]
    zeros = np.zeros(count, np.int64)
    return Batch(
        step=0,
        kind=CreditKind.RETURN,
        tokens_T=np.concatenate(tokens).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum([len(row) for row in tokens])]).astype(np.int64),
        prompt_lengths_N=np.array([len(prompt) for prompt in prompts], np.int64),
        response_offsets=np.arange(count + 1, dtype=np.int64) * response,
        behaviour_logprobs_R=np.zeros(count * response, np.float32),
        mask_R=np.ones(count * response, np.bool_),
        temperature_N=np.ones(count, np.float32),
        values_N=np.zeros(count),
        group_N=zeros,
        rollout_N=zeros,
        turn_N=zeros,
        version_N=zeros,
        scores_N=np.zeros(count),
        keys=tuple(TransitionKey(f"r{i}", 0, "c", 0) for i in range(count)),
    )


def conversations(groups: int, vocabulary: int, prompt: int, response: int, observation: int, turns: int) -> Batch:
    """Groups of rollouts of one prompt; each turn continues the one before."""
    rng = np.random.default_rng(0)
    prompts: list[Any] = []
    replies: list[Any] = []
    for _ in range(groups):
        task = rng.integers(0, vocabulary, prompt)
        for _ in range(GROUP):
            conversation = task
            for _ in range(turns):
                prompts.append(conversation)
                replies.append(rng.integers(0, vocabulary, response))
                conversation = np.concatenate([conversation, replies[-1], rng.integers(0, vocabulary, observation)])
    return batch_of(prompts, replies)


def passes(model: Any, batch: Batch, limits: Limits) -> int:
    """Forward and backward; returns the tokens that were computed."""
    computed = 0
    for micro in micro_batches(batch, np.arange(len(batch)), limits, torch.device("cpu")):
        score(model, micro).logprobs_R.sum().backward()
        computed += micro.computed
    model.zero_grad()
    return computed


def update(models: Sequence[str]) -> Iterator[str]:
    for name in models:
        model = loaded(name).model.train()
        sharing = Limits.of(model, TOKENS_PER_PASS[name])
        layouts = {"rows": replace(sharing, hidden_size=None), "trees": sharing}
        for shape, (prompt, response, observation, turns) in SHAPES.items():
            groups = 1 if name == LARGE else 16 if turns == 1 else 4
            batch = conversations(groups, model.config.vocab_size, prompt, response, observation, turns)
            ways = {layout: partial(passes, model, batch, limits) for layout, limits in layouts.items()}
            tokens = {layout: run() for layout, run in ways.items()}
            best = best_of(3 if name == SMALL else 1, ways)
            cells = [*tokens.values(), *(f"{seconds:.2f}" for seconds in best.values())]
            yield f"{name} | {shape} | {' | '.join(map(str, cells))} | {best['trees'] / best['rows']:.2f}"


def reward(ids: Any) -> float:
    """Different for each reply of a group, so that all are trained on."""
    return float(np.mean(ids))


def steps_of_agl(model: Loaded, prompts: list[Any]) -> list[float]:
    """CPU seconds of each step of the engine's sampler and trainer, as its one thread uses them."""
    trainer = PolicyTrainer(
        model, OptimizerSection(learning_rate=LEARNING_RATE), tokens_per_micro_batch=TOKENS_PER_PASS[SMALL]
    )
    sampler, grpo, seconds = Sampler(model), Grpo(GrpoOptions(beta=0.0)), list[float]()
    for number in range(STEPS):
        started = time.process_time()
        replies = [reply for group in sample(sampler, prompts, number) for reply in group]
        numbers, rewards = np.arange(len(replies)), np.array([reward(reply.ids) for reply in replies])
        batch = replace(
            batch_of([prompt for prompt in prompts for _ in range(GROUP)], [reply.ids for reply in replies]),
            step=1,
            behaviour_logprobs_R=np.concatenate([reply.logprobs for reply in replies]).astype(np.float32),
            values_N=rewards,
            scores_N=rewards,
            group_N=numbers // GROUP,
            rollout_N=numbers,
        )
        result = trainer.update(batch, grpo)
        seconds.append(time.process_time() - started)
        if result.metrics["transitions_trained"] != PROMPTS * GROUP:
            raise RuntimeError(f"{result.metrics['transitions_trained']:g} replies were trained on, not all")
    return seconds


def step(models: Sequence[str]) -> Iterator[str]:
    model = loaded(SMALL)
    yield f"{SMALL} | {min(steps_of_agl(model, make_prompts(model.vocabulary))):.2f}"


HERE = Path(__file__).parent
CALC = HERE.parents[1] / "examples" / "calc" / "train.toml"
STALENESS = {"synchronous": 0, "asynchronous": 4}
AT_LEAST, TOLERANCE = 2.0, 0.02
"""Times the rollouts per hour, and how much lower a final reward may be."""
FULL, QUICK = (30, 16, 200), (2, 2, 10)
"""Steps, groups of a step, and tasks of an evaluation."""


def train(kind: str, seed: int, size: tuple[int, int, int], folder: Path) -> dict[str, float]:
    """The figures of one run, which is not run again if the folder has them."""
    (steps, groups, tasks), name = size, f"{kind}-{seed}"
    file, run = folder / f"{name}.json", folder / "runs" / name
    if file.exists():
        return dict(json.loads(file.read_text()))
    shutil.rmtree(run, ignore_errors=True)  # It was interrupted.
    settings = {
        "name": name,
        "seed": seed,
        "agent.entry": "slow_calc_agent:solve",
        "train.steps": steps,
        "train.groups_per_step": groups,
        "train.group_size": GROUP,
        "train.checkpoint_every": steps,
        "async.max_staleness": STALENESS[kind],
        "algorithm.grpo.importance_cap": 2.0,
        "workers.concurrency": groups * GROUP,
        "engine.torch.threads": 1,
        "eval.every": steps,
        "eval.tasks": tasks,
    }
    arguments = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
    }
    log = folder / f"{name}.log"
    with log.open("w") as output:
        command = [Path(sys.executable).with_name("agl"), "train", CALC, *arguments]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            engine_seconds = watch_engine(process, run / "metrics.jsonl", steps)
            status = process.wait()
        finally:
            process.terminate()
            process.wait()
    if status:
        sys.exit(f"The run failed or was interrupted:\n{log.read_text()}")
    lines = trained_steps(run / "metrics.jsonl")
    rewards = json.loads((run / "summary.json").read_text())["reward"]["after"]
    seconds = sum(line["seconds/step"] for line in lines)
    figures = {
        "rollouts": sum(line["rollouts"] for line in lines),
        "minutes": seconds / 60,
        "busy": engine_seconds / seconds,
        "greedy": rewards["greedy"],
        "sampled": rewards["sampled"],
        "staleness": mean(line["staleness/mean"] for line in lines),
        "stale": sum(line.get("episodes_dropped/stale", 0) for line in lines),
    }
    file.write_text(json.dumps(figures))
    return figures


def trained_steps(metrics: Path) -> list[dict[str, Any]]:
    """The lines of training steps; the last line may be half there."""
    whole = metrics.read_text().rpartition("\n")[0] if metrics.exists() else ""
    return [line for line in map(json.loads, whole.splitlines()) if line["kind"] == "train"]


def watch_engine(process: subprocess.Popen[bytes], metrics: Path, steps: int) -> float:
    """The engine's CPU seconds from the end of the first evaluation to the end of the last step."""
    started = None
    while process.poll() is None:
        if started is None and metrics.exists() and "\n" in metrics.read_text():
            started = engine_cpu(process.pid)
        if any(step["step"] == steps for step in trained_steps(metrics)):
            return engine_cpu(process.pid) - (started or 0.0)
        time.sleep(0.1)
    return 0.0


def engine_cpu(pid: int) -> float:
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if "agl_torch.process" in child.cmdline():
                times = child.cpu_times()
                return float(times.user + times.system)
        except psutil.Error:  # Another child has just ended.
            continue
    return 0.0


def compare_async(seeds: int, size: tuple[int, int, int], folder: Path) -> tuple[str, str | None]:
    """The table, and why the comparison failed."""
    runs = {kind: [train(kind, seed, size, folder) for seed in range(seeds)] for kind in STALENESS}
    means = {kind: {key: mean(run[key] for run in measured) for key in measured[0]} for kind, measured in runs.items()}
    rows = []
    for kind, measured in runs.items():
        average = means[kind]
        rewards = [
            f"{average[mode]:.3f} ({min(run[mode] for run in measured):.3f}–{max(run[mode] for run in measured):.3f})"
            for mode in ("greedy", "sampled")
        ]
        rows.append(
            f"{kind} | {seeds} | {average['rollouts']:.0f} | {average['minutes']:.1f} "
            f"| {60 * average['rollouts'] / average['minutes']:,.0f} | {average['busy']:.0%} | {' | '.join(rewards)} "
            f"| {average['staleness']:.2f} | {average['stale']:.0f}"
        )
    waiting, going_on = means["synchronous"], means["asynchronous"]
    times = going_on["rollouts"] / going_on["minutes"] / (waiting["rollouts"] / waiting["minutes"])
    head = (
        "run | seeds | rollouts | minutes | rollouts per hour | engine busy | greedy | sampled | mean staleness | stale"
    )
    text = (
        f"{table(head, rows)}\n\n{times:.1f} times the rollouts per hour. {size[0]} steps of {size[1]} · "
        f"{GROUP} rollouts, a tool call takes 1 s at the median; {datetime.date.today():%B %Y}, {machine()}."
    )
    if times < AT_LEAST:
        return text, f"The rollouts per hour were to be {AT_LEAST:g} times as many."
    if min(going_on[mode] - waiting[mode] for mode in ("greedy", "sampled")) < -TOLERANCE:
        return text, "The final reward is worse."
    return text, None


PARTS: Mapping[str, tuple[str, Callable[[Sequence[str]], Iterator[str]]]] = {
    "sampling": ("model | CPU s, `generate` | CPU s, sampler | times as fast", sampling),
    "update": (
        "model | transitions of a group | tokens, rows | tokens, trees | CPU s, rows | CPU s, trees | ratio", update
    ),
    "step": ("model | CPU s", step),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "async"])
    parser.add_argument("--large", action="store_true", help="also a model of 135M parameters")
    parser.add_argument("--seeds", type=int, default=3, help="of async: how many, 0, 1, …")
    parser.add_argument("--folder", type=Path, help="of async: for its runs; by default, none that stays")
    parser.add_argument("--quick", action="store_true", help="of async: two small steps with one seed")
    parser.add_argument("--write", action="store_true", help="of async: put the table into docs/asynchronous.md")
    options = parser.parse_args()
    if options.part != "async":
        torch.set_num_threads(1)
        head, rows = PARTS[options.part]
        print(table(head, rows([SMALL, LARGE] if options.large else [SMALL])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        text, failure = compare_async(1 if options.quick else options.seeds, QUICK if options.quick else FULL, folder)
    print(text)
    if options.write and not options.quick:
        write("asynchronous.md", Path(__file__).name, text)
    if failure and not options.quick:
        sys.exit(failure)


if __name__ == "__main__":
    main()
