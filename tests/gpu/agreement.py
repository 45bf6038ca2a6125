"""The torch engine on the GPU against itself on the CPU in float32: log-probabilities, one update, and replies.

Each line is one device in one dtype. The replies on which all of them are compared are the CPU's, in float32.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from agl_algorithms.grpo import Grpo
from agl_algorithms.options import GrpoOptions
from agl_core.config.policies import OptimizerSection
from agl_core.testing.engines import Row, batch_of
from agl_core.types import Batch
from agl_torch.models.loading import LoadedModel, load_model
from agl_torch.training.batching import Limits, micro_batches, score
from agl_torch.training.trainer import PolicyTrainer

from .engines import RATE, Replies, spec_of, started, torch_engine
from .models import CALC, SMALL_LLAMA, Model
from .parts import Setup, Table

COLUMNS = (
    "model", "device, dtype", "log-probability: largest difference", "mean", "loss", "gradient norm, relative",
    "change of the weights: cosine", "norm, relative", "served and trained: largest difference", "mean",
    "replies the same again",
)  # fmt: skip
TOKENS_PER_PASS = 4096
TWICE = GrpoOptions(beta=0.0, epochs=2)
"""The loss of the first pass over a batch does not depend on the weights: every ratio is one."""


@dataclass(frozen=True)
class Bounds:
    """How far a dtype may be from the CPU's float32. A CPU's bfloat16 is within them too."""

    mean: float
    """Of the differences of log-probabilities, from the CPU's and between serving and training."""
    cosine: float
    """Of the changes that an update makes to the weights."""

    def beyond(self, gap: float, served: float, cosine: float) -> list[str]:
        """What is further away; a number that is none is."""
        found = [
            f"log-probabilities are {value:.1e} from {what} on average, which may be at most {self.mean:g}."
            for what, value in (("the CPU's", gap), ("those that were served", served))
            if not value <= self.mean
        ]
        if not cosine >= self.cosine:
            found.append(
                f"the update's cosine with the CPU's is {cosine:.4f}, which has to be at least {self.cosine:g}."
            )
        return found


BOUNDS = {"float32": Bounds(1e-4, 0.999), "bfloat16": Bounds(0.05, 0.5)}
"""The calc policy in bfloat16 on a CPU: 0.007 and 0.91 (one epoch). An unrelated change has a cosine of about 0."""


@dataclass(frozen=True)
class Made:
    """What one device made of the common replies, in one dtype."""

    logprobs_R: NDArray[np.float64]
    loss: float
    grad_norm: float
    change: torch.Tensor


def measure(setup: Setup, seconds: float) -> Table:
    transformers_logging.disable_progress_bar()

    async def measured() -> Table:
        async with asyncio.timeout(seconds):
            models = (CALC,) if setup.stand_in else (CALC, SMALL_LLAMA)
            made = [await compare(model, setup) for model in models]
            torch.cuda.empty_cache()  # The parts that follow start engines on the same GPU.
        return Table(COLUMNS, [*chain(*(each.rows for each in made))], [*chain(*(each.beyond for each in made))])

    return asyncio.run(measured())


async def compare(model: Model, setup: Setup) -> Table:
    """One model on both devices, in both dtypes."""
    folder, wanted = model.folder(setup.folder), Replies(8, 24 if setup.stand_in else 64)
    common = batch_of((await asked(setup, folder, "cpu", "float32", wanted))[0])
    reference = update(folder, "cpu", "float32", common)
    rows, beyond = [], []
    for device in dict.fromkeys(("cpu", setup.device)):
        for dtype, bounds in BOUNDS.items():
            replies, same = await asked(setup, folder, device, dtype, wanted)
            loaded = load(folder, device, dtype)
            check_replies(replies, loaded.vocabulary)
            own = batch_of(replies)
            served = np.abs(logprobs(loaded, own) - own.behaviour_logprobs_R)
            found = update(folder, device, dtype, common)
            gap = np.abs(found.logprobs_R - reference.logprobs_R)
            cosine = float(torch.nn.functional.cosine_similarity(found.change, reference.change, dim=0))
            rows.append(
                (
                    model.name,
                    f"{device}, {dtype}",
                    *(f"{each:.1e}" for each in (gap.max(), gap.mean(), abs(found.loss - reference.loss))),
                    f"{abs(found.grad_norm / reference.grad_norm - 1):.1e}",
                    f"1 - {max(0.0, 1 - cosine):.1e}",
                    f"{abs(float(found.change.norm() / reference.change.norm()) - 1):.1e}",
                    *(f"{each:.1e}" for each in (served.max(), served.mean())),
                    f"{same} of {len(replies)}",
                )
            )
            place = f"{model.name}, {device}, {dtype}"
            beyond += [f"{place}: {each}" for each in bounds.beyond(gap.mean(), served.mean(), cosine)]
    return Table(COLUMNS, rows, beyond)


async def asked(setup: Setup, model: Path, device: str, dtype: str, wanted: Replies) -> tuple[list[Row], int]:
    """Replies of an engine, and how many of them are the same when it is asked once more."""
    run = setup.folder / f"{model.name}-{device}-{dtype}"
    async with started(torch_engine(setup, device), run, spec_of(model, dtype)) as running:
        first, again = await running.rows(wanted), await running.rows(wanted)
    return first, sum(list(one.response) == list(other.response) for one, other in zip(first, again, strict=True))


def check_replies(rows: list[Row], vocabulary: int) -> None:
    """They are replies: ids of the vocabulary, each with the logarithm of a probability."""
    for row in rows:
        logprobs_R, ids = np.array(row.logprobs), np.array(row.response)
        if not (0 < len(ids) == len(logprobs_R) and ids.min() >= 0 and ids.max() < vocabulary):
            raise AssertionError(f"a reply is not made of tokens of the model: {row.response}")
        if not (np.isfinite(logprobs_R).all() and logprobs_R.max() <= 0):
            raise AssertionError(f"log-probabilities of a reply are none: {row.logprobs}")


def load(model: Path, device: str, dtype: str) -> LoadedModel:
    return load_model(spec_of(model, dtype), torch.device(device), 0)


def logprobs(loaded: LoadedModel, batch: Batch) -> NDArray[np.float64]:
    """[R] as an update computes them."""
    found_R = torch.zeros(len(batch.behaviour_logprobs_R), dtype=torch.float64)
    limits = Limits.of(loaded.model, TOKENS_PER_PASS, loaded.context_length)
    with torch.no_grad():
        for micro in micro_batches(batch, np.arange(len(batch)), limits, loaded.device):
            found_R[micro.tokens_R.cpu()] = score(loaded.model, micro).logprobs_R.double().cpu()
    return found_R.numpy()


def update(model: Path, device: str, dtype: str, batch: Batch) -> Made:
    """One update from the first weights."""
    loaded = load(model, device, dtype)
    before_R, before = logprobs(loaded, batch), flat(loaded)
    trainer = PolicyTrainer(loaded, OptimizerSection(learning_rate=RATE), tokens_per_micro_batch=TOKENS_PER_PASS)
    metrics = trainer.update(batch, Grpo(TWICE)).metrics
    return Made(before_R, metrics["loss"], metrics["grad_norm"], flat(loaded) - before)


def flat(loaded: LoadedModel) -> torch.Tensor:
    """All weights, on the CPU in float64 (a cosine of millions of them needs it)."""
    return torch.cat([each.detach().flatten().cpu().double() for each in loaded.model.parameters()])
