"""Check and measure the engines on one CUDA GPU, in ten minutes, with what is installed; see docs/gpu.md.

    python -m tests.gpu                # prints the figures in Markdown, each part's when it ends
    python -m tests.gpu --part speed   # one part
    python -m tests.gpu --device cpu   # plays the parts small, on the CPU

An engine is used as a run uses it: its process is started, asked over HTTP, and updated with its own replies. veRL's
part is left out, and says so, where veRL is not installed. The exit status is 1 if a part failed, or found the GPU and
the CPU further apart than rounding explains.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import agl_algorithms.plugin
from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import GrpoOptions
from agl_core.config.sections import OptimizerSection
from agl_core.protocols import Engine, EngineContext, PolicySpec
from agl_core.testing.engines import EngineCase, Row, batch_of
from agl_core.types import Batch
from agl_torch.engine import TorchEngine
from agl_torch.loading import LoadedModel, load_model
from agl_torch.plugin import TorchOptions
from agl_torch.trainer import PolicyTrainer

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "examples" / "calc" / "policy"
ALGORITHM, OPTIONS = "grpo", {"beta": 0.0}
TOKENS_PER_PASS = 4096
Make: TypeAlias = Callable[[EngineContext], Engine]


@dataclass(frozen=True)
class Setup:
    """Where a part is played."""

    device: str
    """"cuda", or "cpu" as its stand-in, with sizes that take seconds."""
    folder: Path
    """For models and the engines' runs; it is removed afterwards."""

    @property
    def stand_in(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class Table:
    """The figures of a part."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    beyond: Sequence[str] = ()
    """The failed checks, one sentence each."""


@dataclass(frozen=True)
class Model:
    """A model; without a shape it is the calc example's policy.

    Others have random weights in the shape of a model that people use: they have the speed and the memory of trained
    ones.
    """

    name: str
    shape: Mapping[str, Any] | None = None

    def folder(self, below: Path) -> Path:
        """The folder of its weights; random ones are made there, in bfloat16, with the calc example's tokenizer."""
        if self.shape is None:
            return POLICY
        folder = below / self.name.replace(" ", "-")
        if not folder.exists():
            config = AutoConfig.for_model(
                **self.shape, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0
            )
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(POLICY / name, folder)
        return folder


CALC = Model("calc policy, 0.9M")
SMOLLM_SHAPED = Model(
    "Llama, 135M",
    {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
     "num_attention_heads": 9, "num_key_value_heads": 3},
)  # fmt: skip
QWEN_SHAPED = Model(
    "Qwen2, 0.5B",
    {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
     "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
)  # fmt: skip
STAND_IN = Model(
    "Llama, 0.3M",
    {"model_type": "llama", "vocab_size": 2048, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
     "num_attention_heads": 3, "num_key_value_heads": 1},
)  # fmt: skip


async def replies(engine: EngineCase, questions: int, tokens: int) -> list[Row]:
    """Sampled replies of at most so many tokens to questions asked at the same time, each with its own seed."""
    texts = (f"What is {number + 11} plus {7 * number + 5}? " * 6 for number in range(questions))
    answers = await asyncio.gather(
        *(engine.ask(question, max_tokens=tokens, seed=number) for number, question in enumerate(texts))
    )
    return [Row.of_reply(answer.raise_for_status().json(), float(i % 2)) for i, answer in enumerate(answers)]


async def sampled(engine: EngineCase, questions: int, tokens: int) -> Batch:
    """Replies of the version that is served, as one group."""
    return batch_of(await replies(engine, questions, tokens), version=await engine.version())


def spec_of(model: Path, dtype: str, lora: dict[str, Any] | None = None, rate: float = 1e-3) -> PolicySpec:
    return PolicySpec(
        str(model), dtype, lora=lora, optimizer={"learning_rate": rate}, algorithm=ALGORITHM, algorithm_options=OPTIONS
    )


@asynccontextmanager
async def started(make: Make, run: Path, spec: PolicySpec) -> AsyncIterator[EngineCase]:
    """The engine, until the block ends."""
    try:
        importlib.metadata.distribution("agl-algorithms")
        plugin_files: tuple[Path, ...] = ()
    except importlib.metadata.PackageNotFoundError:  # Used from source, the algorithms have no entry point.
        plugin_files = (Path(agl_algorithms.plugin.__file__),)
    context = EngineContext(
        run_dir=run,
        seed=1,
        policies={"default": spec},
        deterministic=False,
        plugin_files=plugin_files,
        api_key="the-key",
        steps=10,
    )
    engine = make(context)
    try:
        yield EngineCase(engine, await engine.start(), context, run)
    finally:
        await engine.stop()


def torch_engine(device: str) -> Make:
    options = TorchOptions.model_validate({"device": device})
    return lambda context: TorchEngine(options, context)


BOUNDS = {"float32": (1e-4, 0.999), "bfloat16": (0.05, 0.5)}
"""How far a dtype may be from the CPU's float32 (a CPU's bfloat16 is within it too): the mean difference of
log-probabilities, from the CPU's and between serving and training, and the cosine of an update's changes. The calc
policy in bfloat16 on a CPU: 0.007 and 0.91 (one epoch). An unrelated change has a cosine of about 0.
"""


async def agreement(setup: Setup) -> Table:
    """Log-probabilities, one update, and replies, against the CPU in float32; a line is one device in one dtype."""
    transformers_logging.disable_progress_bar()
    models = (CALC,) if setup.stand_in else (CALC, SMOLLM_SHAPED)
    tables = [await compare(model, setup) for model in models]
    torch.cuda.empty_cache()  # The parts that follow start engines on the same GPU.
    rows, beyond = ([*chain(*parts)] for parts in zip(*((part.rows, part.beyond) for part in tables), strict=True))
    return Table(tables[0].columns, rows, beyond)


async def compare(model: Model, setup: Setup) -> Table:
    """One model on both devices, in both dtypes, on the replies that the CPU sampled in float32."""
    folder, tokens = model.folder(setup.folder), 24 if setup.stand_in else 64

    async def replies_twice(device: str, dtype: str) -> tuple[list[Row], int]:
        """Replies of an engine, and how many of them are the same when it is asked once more."""
        run = setup.folder / f"{model.name}-{device}-{dtype}"
        async with started(torch_engine(device), run, spec_of(folder, dtype)) as engine:
            first, again = await replies(engine, 8, tokens), await replies(engine, 8, tokens)
        return first, sum(list(one.response) == list(other.response) for one, other in zip(first, again, strict=True))

    common = batch_of((await replies_twice("cpu", "float32"))[0])
    reference = Updated.of(folder, "cpu", "float32", common)
    rows, beyond = [], []
    for device in dict.fromkeys(("cpu", setup.device)):
        for dtype, (most, least) in BOUNDS.items():
            own_rows, same = await replies_twice(device, dtype)
            own = batch_of(own_rows)
            served = np.abs(trainer_of(load(folder, device, dtype)).logprobs(own) - own.behaviour_logprobs_R)
            updated = Updated.of(folder, device, dtype, common)
            gap = np.abs(updated.logprobs_R - reference.logprobs_R)
            cosine = float(torch.nn.functional.cosine_similarity(updated.change, reference.change, dim=0))
            figures = [gap.max(), gap.mean(), abs(updated.loss - reference.loss)]
            figures += [abs(updated.grad_norm / reference.grad_norm - 1)]
            figures += [abs(float(updated.change.norm() / reference.change.norm()) - 1), served.max(), served.mean()]
            cells = [f"{figure:.1e}" for figure in figures]
            cells.insert(4, f"1 - {max(0.0, 1 - cosine):.1e}")
            rows.append((model.name, f"{device}, {dtype}", *cells, f"{same} of {len(own_rows)}"))
            # Written so that no number at all is beyond too.
            beyond += [
                f"{model.name}, {device}, {dtype}: log-probabilities are {mean:.1e} from {other} on average, which may "
                f"be at most {most:g}."
                for other, mean in (("the CPU's", gap.mean()), ("those that were served", served.mean()))
                if not mean <= most
            ]
            if not cosine >= least:
                beyond.append(
                    f"{model.name}, {device}, {dtype}: the update's cosine with the CPU's is {cosine:.4f}, which has "
                    f"to be at least {least:g}."
                )
    columns = (
        "model", "device, dtype", "log-probability: largest difference", "mean", "loss", "gradient norm, relative",
        "change of the weights: cosine", "norm, relative", "served and trained: largest difference", "mean",
        "replies the same again",
    )  # fmt: skip
    return Table(columns, rows, beyond)


@dataclass(frozen=True)
class Updated:
    """One update from the first weights, on one device in one dtype."""

    logprobs_R: NDArray[np.float64]
    """Before it."""
    loss: float
    grad_norm: float
    change: torch.Tensor
    """Of all weights."""

    @classmethod
    def of(cls, model: Path, device: str, dtype: str, batch: Batch) -> Updated:
        loaded = load(model, device, dtype)
        trainer = trainer_of(loaded)
        before_R, before = trainer.logprobs(batch), weights_of(loaded)
        # The loss of the first pass over a batch does not depend on the weights: every ratio is one.
        metrics = trainer.update(batch, Grpo(GrpoOptions(beta=0.0, epochs=2))).metrics
        return cls(before_R, metrics["loss"], metrics["grad_norm"], weights_of(loaded) - before)


def load(model: Path, device: str, dtype: str) -> LoadedModel:
    return load_model(spec_of(model, dtype), torch.device(device), 0)


def trainer_of(loaded: LoadedModel) -> PolicyTrainer:
    return PolicyTrainer(loaded, OptimizerSection(learning_rate=1e-3), tokens_per_micro_batch=TOKENS_PER_PASS)


def weights_of(loaded: LoadedModel) -> torch.Tensor:
    """All of them, on the CPU in float64: a cosine of millions of them needs it."""
    return torch.cat([weights.detach().flatten().cpu().double() for weights in loaded.model.parameters()])


async def speed(setup: Setup) -> Table:
    """Tokens per second of decoding and of updates, and memory, of the torch engine's process."""
    models = [(CALC, "float32"), (STAND_IN, "bfloat16")]
    if not setup.stand_in:
        models = [(CALC, "float32"), (SMOLLM_SHAPED, "bfloat16"), (QWEN_SHAPED, "bfloat16")]
    rows = [
        (model.name, "LoRA" if lora else "all weights", dtype, *await speed_of(setup, model, dtype, lora))
        for model, dtype in models
        for lora in (False, True)
    ]
    columns = (
        "model", "trained", "dtype", "start, s", "decoded, tokens/s", "updated, tokens/s", "memory, GiB",
        "served and trained: largest difference",
    )  # fmt: skip
    return Table(columns, rows)


async def speed_of(setup: Setup, model: Model, dtype: str, lora: bool) -> tuple[str, ...]:
    """The first replies and the first update warm up, and are not counted."""
    adapter = {"rank": 16, "alpha": 32.0} if lora else None
    began = time.perf_counter()
    spec = spec_of(model.folder(setup.folder), dtype, adapter)
    run = setup.folder / f"{model.name}-{lora}"
    async with started(torch_engine(setup.device), run, spec) as engine:
        ready, stats = time.perf_counter() - began, engine.engine.stats
        await replies(engine, 8, 16)
        before, began = await stats(), time.perf_counter()
        batch = await sampled(engine, *((8, 16) if setup.stand_in else (128, 128)))
        seconds, after = time.perf_counter() - began, await stats()
        first, second = await engine.update(batch), await engine.update(batch)
        at_last = await stats()
    memory = at_last["peak_rss_bytes" if setup.stand_in else "peak_gpu_bytes"]
    return (
        f"{ready:.1f}",
        f"{(after['tokens_decoded'] - before['tokens_decoded']) / seconds:,.0f}",
        f"{len(batch.tokens_T) / second.metrics['seconds_update']:,.0f}",
        f"{memory / 2**30:.2f}",
        f"{first.metrics['logprob_gap_max']:.1e}",
    )


async def verl_steps(setup: Setup) -> Table:
    """Three steps of the veRL engine with vLLM on one GPU: a LoRA adapter, offloading, a restart."""
    from agl_verl.engine import VerlEngine
    from agl_verl.plugin import VerlOptions

    # agl's part of veRL's workers: used from source, it has no entry point.
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "agl_verl.verl_plugin")
    options = VerlOptions.model_validate(
        {"device": setup.device, "attention": "sdpa", "offload": True, "serving_memory": 0.3, "max_context": 1024}
    )
    return await three_steps(lambda context: VerlEngine(options, context), setup, "bfloat16", (16, 64))


LARGEST_MEAN = 0.02
"""Difference of probabilities in serving and in training: rounding to bfloat16 explains less, a forgotten adapter makes
it many times as much."""


async def three_steps(make: Make, setup: Setup, dtype: str, sizes: tuple[int, int]) -> Table:
    """Two updates, a checkpoint, another process that goes on from it, and a third update.

    At its learning rate two updates change a tiny policy so much that serving its base would be noticed.
    """
    spec = spec_of(CALC.folder(setup.folder), dtype, {"rank": 8, "alpha": 16.0}, 4e-3)
    rows, beyond, checkpoint = [], [], setup.folder / "checkpoint"
    for steps in ((1, 2), (3,)):
        async with started(make, setup.folder / f"run-{steps[0]}", spec) as engine:
            if checkpoint.exists():
                await engine.engine.load(checkpoint)
            for step in steps:
                batch = await sampled(engine, *sizes)
                began = time.perf_counter()
                result = await engine.update(batch)
                seconds, metrics = time.perf_counter() - began, result.metrics
                largest, mean = metrics.get("rollout_probs_diff_max"), metrics["prob_gap_mean"]
                name, gap = f"{step}, resumed" if step == 3 else str(step), "-" if largest is None else f"{largest:.1e}"
                tokens, norm = f"{metrics['tokens_trained']:.0f}", f"{metrics['grad_norm']:.2e}"
                rows.append((name, tokens, norm, gap, f"{mean:.1e}", f"{seconds:.1f}"))
                if result.version != step:
                    beyond.append(f"Step {step} made version {result.version}.")
                if not mean <= LARGEST_MEAN:
                    beyond.append(
                        f"Step {step}: probabilities in serving and in training differ by {mean:.3f} on average, which "
                        f"may be at most {LARGEST_MEAN:g}."
                    )
            if not checkpoint.exists():
                await engine.engine.save(checkpoint)
    columns = (
        "step", "tokens trained", "gradient norm", "served and trained, probabilities: largest difference", "mean",
        "update, s",
    )  # fmt: skip
    return Table(columns, rows, beyond)


VERL = ("verl", "ray", "vllm", "tensordict", "transfer_queue", "hydra")


@dataclass(frozen=True)
class Part:
    """One table."""

    title: str
    play: Callable[[Setup], Awaitable[Table]]
    needs: Sequence[str] = ()
    """Modules that have to be installed."""


PARTS: Mapping[str, Part] = {
    "agreement": Part("The torch engine on the GPU and on the CPU", agreement),
    "speed": Part("Tokens per second and memory", speed),
    "verl_steps": Part(
        "Three steps of the veRL engine, with a LoRA adapter, offloading and a restart", verl_steps, VERL
    ),
}


def play(part: Part, device: str, folder: Path, deadline: float) -> tuple[str, bool]:
    """Play a part: its text in Markdown, and whether it went well. It stops no other part."""
    remaining = deadline - time.monotonic()
    if absent := [name for name in part.needs if importlib.util.find_spec(name) is None]:
        return f"Not run: not installed: {', '.join(absent)}.", True
    if remaining <= 0:
        return "Not run: the time was over.", True
    folder.mkdir()
    began = time.monotonic()
    try:
        table = asyncio.run(asyncio.wait_for(part.play(Setup(device, folder)), remaining))
    except Exception as error:
        traceback.print_exc()
        return f"**It failed: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}**", False
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    paragraphs = ["\n".join(f"| {' | '.join(line)} |" for line in lines), *(f"**{text}**" for text in table.beyond)]
    return "\n\n".join([*paragraphs, f"It took {time.monotonic() - began:.0f} s."]), not table.beyond


def machine(device: str) -> str:
    """The conditions of the measurement: the device, the versions, the date."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}; {time.strftime('%d %B %Y')}"
    if device == "cpu":
        return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads), {versions}"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB), CUDA {torch.version.cuda}, {versions}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0, help="no part goes on after that many")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"Nothing was run: no CUDA GPU: torch {torch.__version__} finds none. --device cpu plays on the CPU.")
    deadline, went_well = time.monotonic() + 60 * options.minutes, True
    print(f"Measured on: {machine(options.device)}.\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="agl-gpu-") as folder:
        for name in options.part or PARTS:
            text, good = play(PARTS[name], options.device, Path(folder) / name, deadline)
            print(f"### {PARTS[name].title}\n\n{text}\n", flush=True)
            went_well = went_well and good
    return int(not went_well)


if __name__ == "__main__":
    sys.exit(main())
