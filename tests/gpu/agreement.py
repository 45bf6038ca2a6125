"""The torch engine on a GPU against the CPU in float32: log-probabilities, one update, and what was served."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import GrpoOptions
from agl_core.config.sections import OptimizerSection
from agl_core.testing.engines import batch_of
from agl_core.types import Batch
from agl_server.health.certificate import TOLERANCES
from agl_torch.loading import LoadedModel, load_model
from agl_torch.trainer import PolicyTrainer

from .kit import CALC, SMOLLM_SHAPED, Model, Setup, Table, ask, client_of_engine, spec_of, started

TOKENS_PER_PASS = 4096
BOUNDS = {"float32": (1e-4, 0.999), "bfloat16": (0.05, 0.5)}
"""How far a dtype may be from the CPU's float32 (a CPU's bfloat16 is within it too): the mean difference of
log-probabilities, from the CPU's and between serving and training, and the cosine of an update's changes. The calc
policy in bfloat16 on a CPU: 0.007 and 0.91 (one epoch). An unrelated change has a cosine of about 0.
"""


async def agreement(setup: Setup) -> Table:
    """Log-probabilities, one update, and replies, against the CPU in float32; a line is one device in one dtype."""
    models = (CALC,) if setup.stand_in else (CALC, SMOLLM_SHAPED)
    tables = [await compare(model, setup) for model in models]
    torch.cuda.empty_cache()  # The parts that follow start engines on the same GPU.
    rows, beyond = ([*chain(*parts)] for parts in zip(*((part.rows, part.beyond) for part in tables), strict=True))
    return Table(tables[0].columns, rows, beyond)


async def compare(model: Model, setup: Setup) -> Table:
    """One model on both devices, in both dtypes, on the replies that the CPU sampled in float32."""
    folder, tokens = model.folder(setup), 24 if setup.stand_in else 64

    async def replies_twice(device: str, dtype: str) -> tuple[Batch, int]:
        """Replies of an engine, and how many of them are the same when it is asked once more."""
        run = setup.folder / f"{model.name}-{device}-{dtype}"
        async with started(device, run, spec_of(folder, dtype)) as engine, client_of_engine(engine.upstream) as client:
            first, again = [await ask(client, engine.policy, 8, tokens) for _ in range(2)]
        pairs = zip(first, again, strict=True)
        return batch_of(first), sum(list(one.response) == list(other.response) for one, other in pairs)

    common = (await replies_twice("cpu", "float32"))[0]
    reference = Updated.of(folder, "cpu", "float32", common)
    rows, beyond = [], []
    for device in dict.fromkeys(("cpu", setup.device)):
        for dtype, (most, least) in BOUNDS.items():
            own, same = await replies_twice(device, dtype)
            trained_R = trainer_of(load(folder, device, dtype)).logprobs(own).logprobs_R
            served = np.abs(trained_R - own.behaviour_logprobs_R)
            updated = Updated.of(folder, device, dtype, common)
            gap = np.abs(updated.logprobs_R - reference.logprobs_R)
            cosine = float(torch.nn.functional.cosine_similarity(updated.change, reference.change, dim=0))
            figures = [gap.max(), gap.mean(), abs(updated.loss - reference.loss)]
            figures += [abs(updated.grad_norm / reference.grad_norm - 1)]
            figures += [abs(float(updated.change.norm() / reference.change.norm()) - 1)]
            cells = [f"{figure:.1e}" for figure in figures]
            cells.insert(4, f"1 - {max(0.0, 1 - cosine):.1e}")
            exact = (served <= TOLERANCES[dtype]).mean()
            cells += [f"{served.max():.1e}", f"{served.mean():.1e}", f"{exact:.2%}", f"{same} of {len(own)}"]
            rows.append((model.name, f"{device}, {dtype}", *cells))
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
        "tokens proved exact", "replies the same again",
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
        before_R, before = trainer.logprobs(batch).logprobs_R, weights_of(loaded)
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
