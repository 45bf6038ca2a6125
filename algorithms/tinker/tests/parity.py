"""The torch engine and this one with skyrl-tx compared (`tests/support/engine_parity.py`), on the service's adapters.

`python -m algorithms.tinker.tests.parity`, after `make test-tinker`, writes docs/parity.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load as load_safetensors
from torch import Tensor

from agl_algorithms.policy_gradient import Algorithm
from agl_core.config.sections import LoraSection, OptimizerSection
from agl_core.plugins import Plugins
from agl_core.protocols import EngineContext, PolicySpec, Upstream
from agl_core.types import Batch
from agl_server.engines.child import build_algorithm
from agl_tinker.plugin import TinkerEngine, TinkerOptions
from agl_torch.loading import load_model
from agl_torch.trainer import PolicyTrainer
from tests.support.engine_parity import CASES, STEPS, Case, Distance, Made, compared, write
from tests.support.recorded_batches import TOO_LONG, record

from .skyrl_tx import KEY, SkyrlTx, skyrl_tx

POSSIBLE = {name: case for name, case in CASES.items() if case.name != "ppo" and "entropy" not in case.options}
"""A service has no critic and tells no entropies."""
FROZEN = "frozen"
GRADIENT_CASES = ("GRPO, one optimizer step", "DPO", "REINFORCE++ across calls")
"""The cases whose gradients are compared too; with one optimizer step each."""
RANK = 8
VOCABULARY = 512
TRAINING_STEPS = 4
ADAM = OptimizerSection(learning_rate=3e-4, max_grad_norm=1e9, schedule="cosine")
"""skyrl-tx ignores the largest norm, so that nothing is clipped here."""
LARGE = 1e3
GRADIENT = ADAM.model_copy(update={"learning_rate": 1e-2 * LARGE})
GRADIENT_PLUGIN = f'''"""Adam that forgets, with a large epsilon: a step is the gradient times a number."""

import tinker

Adam = tinker.AdamParams
tinker.AdamParams = lambda **settings: Adam(**(settings | {{"beta1": 0.0, "beta2": 0.0, "eps": {LARGE}}}))
'''


@dataclass(frozen=True)
class Served:
    """An engine with a policy for each case, and one that is not trained."""

    engine: TinkerEngine
    upstream: Upstream
    context: EngineContext
    folders: Mapping[str, Path]
    """The service's folder of each policy's adapter."""

    async def update(self, name: str, batch: Batch) -> Made:
        """The policy's update."""
        before = flat(self.adapter(name))
        result = await self.engine.update(name, batch)
        return Made(result, flat(self.adapter(name)) - before)

    def adapter(self, name: str) -> dict[str, Tensor]:
        """The weights that the service samples from, as peft names them."""
        with self._archive(name) as archive:
            return load_safetensors(archive.extractfile("adapter_model.safetensors").read())  # type: ignore[union-attr]

    def alpha(self, name: str) -> float:
        with self._archive(name) as archive:
            return float(json.load(archive.extractfile("adapter_config.json"))["lora_alpha"])  # type: ignore[arg-type]

    def _archive(self, name: str) -> tarfile.TarFile:
        newest = max(self.folders[name].glob("sampler_weights/*.tar.gz"), key=lambda path: path.stat().st_mtime_ns)
        return tarfile.open(newest)


@asynccontextmanager
async def serve(
    server: SkyrlTx,
    folder: Path,
    cases: Mapping[str, Case],
    optimizer: OptimizerSection,
    plugins: tuple[Path, ...] = (),
) -> AsyncIterator[Served]:
    """The engine runs while the block does, with an adapter of the server for each case."""
    specs = {
        policy_of(name): PolicySpec(
            str(server.policy),
            "float32",
            lora=LoraSection(rank=RANK),
            optimizer=optimizer,
            algorithm=case.name,
            algorithm_options=case.options,
        )
        for name, case in cases.items()
    }
    specs[FROZEN] = PolicySpec(str(server.policy), "float32")
    (folder / "run").mkdir(parents=True)
    context = EngineContext(folder / "run", 0, specs, False, plugins, "the-key", TRAINING_STEPS)
    engine = TinkerEngine(TinkerOptions(base_url=server.url, base_model=server.base, max_context=TOO_LONG), context)
    try:
        upstream = await engine.start()
        await engine.save(folder / "start")
        places = {
            name: json.loads((folder / "start" / name / "tinker.json").read_text())["path"]
            for name in specs
            if name != FROZEN
        }
        folders = {name: server.checkpoints / place.split("/")[2] for name, place in places.items()}
        yield Served(engine, upstream, context, folders)
    finally:
        await engine.stop()


def policy_of(name: str) -> str:
    """The policy of a case: a name that the service takes."""
    return re.sub(r"\W+", "-", name)


class TorchAdapter:
    """The torch engine's trainer, with a service's adapter."""

    def __init__(self, served: Served, name: str) -> None:
        spec = served.context.policies[name]
        spec = replace(spec, lora=LoraSection(rank=RANK, alpha=served.alpha(name)))
        self._loaded = replace(load_model(spec, torch.device("cpu"), 0), context_length=TOO_LONG)
        given = served.adapter(name)
        assert given.keys() == self.adapter().keys()
        set_peft_model_state_dict(self._loaded.model, given)
        self._algorithm: Algorithm = build_algorithm(Plugins.load(), spec.algorithm, spec.algorithm_options)
        seed = list(served.context.policies).index(name)
        self.trainer = PolicyTrainer(
            self._loaded, spec.optimizer, steps=TRAINING_STEPS, tokens_per_micro_batch=4096, seed=seed
        )
        if spec.optimizer is GRADIENT:
            self.trainer.optimizer._adamw.param_groups[0] |= {"betas": (0.0, 0.0), "eps": LARGE}

    def update(self, batch: Batch) -> Made:
        before = flat(self.adapter())
        result = self.trainer.update(batch, self._algorithm)
        return Made(result, flat(self.adapter()) - before)

    def adapter(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in get_peft_model_state_dict(self._loaded.model).items()}


def flat(weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].detach().double().flatten() for name in sorted(weights)])


async def distance(served: Served, name: str) -> Distance:
    return compared(*await updates(served, name))


async def updates(served: Served, name: str) -> list[tuple[Made, Made]]:
    """Both engines' updates from the same weights, in pairs; in the first one only half of an adapter moves."""
    policy = policy_of(name)
    by_torch = TorchAdapter(served, policy)
    made = list[tuple[Made, Made]]()
    for number, step in enumerate(STEPS):
        batch = replace(record(VOCABULARY, POSSIBLE[name].kind, seed=number, temperature=1.0), step=step)
        made.append((by_torch.update(batch), await served.update(policy, batch)))
    return made


def serve_gradients(server: SkyrlTx, folder: Path) -> AbstractAsyncContextManager[Served]:
    """An engine whose optimizer steps are the gradients."""
    plugin = folder / "gradient_steps.py"
    plugin.write_text(GRADIENT_PLUGIN)
    return serve(server, folder, {name: POSSIBLE[name] for name in GRADIENT_CASES}, GRADIENT, (plugin,))


async def _measure(folder: Path) -> dict[str, Distance]:
    with skyrl_tx(folder / "server") as server:
        async with serve(server, folder / "engine", POSSIBLE, ADAM) as served:
            return {name: await distance(served, name) for name in POSSIBLE}


def main() -> None:
    os.environ["TINKER_API_KEY"] = KEY
    with tempfile.TemporaryDirectory() as folder:
        write({"torch, and a service with the Tinker API": asyncio.run(_measure(Path(folder)))})


if __name__ == "__main__":
    main()
