"""Effects of a policy's model and optimizer, and of the torch engine's settings, on real weights."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import numpy as np
import torch

from agl_core.config import LoadedConfig
from agl_core.errors import EngineError
from agl_core.training.child import UpdateRequest
from agl_core.training.server import new_run_dir
from agl_core.training.session import engine_context
from agl_torch.process import Policies
from agl_torch.serving.requests import Request

from .settings_bench import Bench, Effect, Given, ran
from .tiny_policy import CONTEXT, VOCABULARY, make_batch, make_checkpoint

TORCH: Given = {"engine.name": "torch"}
CUSTOM_CODE = """
from transformers import Qwen2ForCausalLM

class OwnForCausalLM(Qwen2ForCausalLM):
    pass
"""


def policies(loaded: LoadedConfig) -> Policies:
    """The policies as the engine's process loads them."""
    return Policies(loaded.engine.options, engine_context(loaded, loaded.config.runs))


def trained(bench: Bench, given: Given) -> str:
    """The weights after two updates."""
    loaded = bench.load({**TORCH, **given})
    made, algorithm = policies(loaded), loaded.policies["default"].algorithm
    for step in (1, 2):
        batch = replace(make_batch(step), step=step)
        request = UpdateRequest("default", algorithm.component.name, algorithm.options.model_dump(), batch)
        made.update(request, lambda _: None)
    digest = hashlib.sha256()
    for name, tensor in made.policies["default"].loaded.model.state_dict().items():
        digest.update(name.encode() + tensor.float().numpy().tobytes())
    return digest.hexdigest()


def dtype(bench: Bench, given: Given) -> str:
    return str(policies(bench.load({**TORCH, **given})).policies["default"].loaded.dtype)


def context_length(bench: Bench, given: Given) -> int:
    return policies(bench.load({**TORCH, **given})).context_length


def threads(bench: Bench, given: Given) -> int:
    policies(bench.load({**TORCH, **given}))
    return torch.get_num_threads()


def device(bench: Bench, given: Given) -> str:
    """Where the weights are, or that there is no such place here."""
    try:
        return policies(bench.load({**TORCH, **given})).policies["default"].loaded.device.type
    except EngineError as error:
        return str(error)


async def listening_at(bench: Bench, given: Given) -> str | None:
    """Where a started engine listens, as it says and is reached; or why it did not start."""
    loaded = bench.load({**TORCH, **given})
    context = replace(engine_context(loaded, new_run_dir(loaded)), plugin_files=())  # its own are for this process
    engine = loaded.engine.build(context)
    try:
        place = urlsplit((await engine.start()).urls[0])
        _, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.close()
        return place.hostname
    except EngineError as error:
        return str(error)
    finally:
        await engine.stop()


def architecture(bench: Bench, given: Given) -> str:
    """The class of a model whose folder brings code."""
    folder = bench.folder / "own_code"
    if not folder.exists():
        shutil.copytree(bench.weights, folder)
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "own_model.OwnForCausalLM"}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "own_model.py").write_text(CUSTOM_CODE)
    with mock.patch("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(bench.folder / "modules")):
        made = policies(bench.load({**TORCH, **given, "policies.default.model.path": str(folder)}))
    return type(made.policies["default"].loaded.model).__name__


def other_weights(bench: Bench, given: Given) -> str:
    if not (bench.folder / "other_weights").exists():
        make_checkpoint(bench.folder / "other_weights", seed=1)
    return trained(bench, given)


def rows_computed_together(bench: Bench, given: Given) -> int:
    """The most rows in one forward pass, with three requests to answer."""
    policy = policies(bench.load({**TORCH, **given})).policies["default"]
    with counted_passes(policy.loaded.model) as rows:
        for name in "abc":
            policy.sampler.submit(Request(name, np.array([5, 6, 7], np.int32), max_tokens=4))
        while not policy.sampler.idle:
            policy.sampler.step()
    return max(rows)


def reused_after_many_prompts(bench: Bench, given: Given) -> int:
    """Tokens of a prompt found in the cache, after many others."""
    sampler = policies(bench.load({**TORCH, **given})).policies["default"].sampler
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, VOCABULARY, (20, CONTEXT - 4)).astype(np.int32)
    for number, prompt in enumerate([*prompts, prompts[0]]):
        sampler.submit(Request(str(number), prompt, max_tokens=2))
        while not sampler.idle:
            generated = sampler.step()
    return generated[0].reused


def passes_of_an_update(bench: Bench, given: Given) -> int:
    """How often a layer is computed, backward pass included."""
    made = policies(bench.load({**TORCH, "algorithm.grpo.beta": 0.0, **given}))
    with counted_passes(made.policies["default"].loaded.model.model.layers[0].mlp) as passes:
        made.update(UpdateRequest("default", "grpo", {"beta": 0.0}, make_batch(1)), lambda _: None)
    return len(passes)


@contextlib.contextmanager
def counted_passes(module: Any) -> Iterator[list[int]]:
    """The number of rows of each forward pass."""
    rows: list[int] = []

    def count(_: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        rows.append((positional[0] if positional else named["input_ids"]).shape[0])

    hook = module.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield rows
    finally:
        hook.remove()


SECOND: Given = {"policies.second.model.path": "Qwen/Qwen2.5-0.5B-Instruct"}
LORA = "policies.default.model.lora"
ADAPTED: Given = {LORA: {"rank": 4}}
OPTIMIZER = "policies.default.optimizer"

EFFECTS: Mapping[str, Effect] = {
    "policies": Effect(ran(lambda run: sorted(run.seen["policies"])), SECOND),
    "policies.NAME.agents": Effect(
        ran(lambda run: {update["policy"] for update in run.updates}), {"policies.second.agents": ["solv*"]}, SECOND
    ),
    "policies.NAME.algorithm.name": Effect(trained, {"policies.default.algorithm.name": "reinforce++"}),
    "policies.NAME.model.path": Effect(other_weights, {"policies.default.model.path": "other_weights"}),
    "policies.NAME.model.dtype": Effect(dtype, {"policies.default.model.dtype": "bfloat16"}),
    "policies.NAME.model.trust_remote_code": Effect(architecture, {"policies.default.model.trust_remote_code": True}),
    "policies.NAME.model.lora.rank": Effect(trained, {f"{LORA}.rank": 2}, ADAPTED),
    "policies.NAME.model.lora.alpha": Effect(trained, {f"{LORA}.alpha": 8.0}, ADAPTED),
    "policies.NAME.model.lora.targets": Effect(trained, {f"{LORA}.targets": ["q_proj"]}, ADAPTED),
    **{
        f"policies.NAME.optimizer.{name}": Effect(trained, {f"{OPTIMIZER}.{name}": value})
        for name, value in {
            "learning_rate": 0.001,
            "schedule": "cosine",
            "warmup_steps": 4,
            "weight_decay": 0.1,
            "max_grad_norm": 1e-4,
        }.items()
    },
    "engine.torch.device": Effect(device, {"engine.torch.device": "cuda"}, {"engine.torch.device": "cpu"}),
    "engine.torch.start_timeout": Effect(listening_at, {"engine.torch.start_timeout": 0.01}),
    "engine.torch.threads": Effect(threads, {"engine.torch.threads": 2}),
    "engine.torch.max_context": Effect(context_length, {"engine.torch.max_context": 100}),
    "engine.torch.max_rows": Effect(rows_computed_together, {"engine.torch.max_rows": 2}),
    "engine.torch.cache_mib": Effect(reused_after_many_prompts, {"engine.torch.cache_mib": 1}),
    "engine.torch.tokens_per_micro_batch": Effect(passes_of_an_update, {"engine.torch.tokens_per_micro_batch": 40}),
    "engine.torch.gradient_checkpointing": Effect(passes_of_an_update, {"engine.torch.gradient_checkpointing": True}),
}
