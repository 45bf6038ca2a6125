"""The parts of the kit share this: models, started engines, and the replies that engines are asked for."""

from __future__ import annotations

import asyncio
import importlib.metadata
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import agl_algorithms.plugin
from agl_core.protocols import EngineContext, PolicySpec, Upstream
from agl_core.testing.engines import EngineCase, Row
from agl_torch.plugin import TorchEngine, TorchOptions

POLICY = Path(__file__).parents[2] / "examples" / "calc" / "policy"
ALGORITHM, OPTIONS = "grpo", {"beta": 0.0}


@dataclass(frozen=True)
class Setup:
    """Where a part is played."""

    device: str
    """"cuda", or "cpu" as its stand-in, with sizes that take seconds."""
    folder: Path
    """For the engines' runs; it is removed afterwards."""
    models: Path
    """For models with random weights, which parts share."""

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

    def folder(self, setup: Setup) -> Path:
        """The folder of its weights; random ones are made there, in bfloat16, on the part's device."""
        if self.shape is None:
            return POLICY
        folder = setup.models / self.name.replace(" ", "-")
        if not folder.exists():
            config = AutoConfig.for_model(
                **self.shape, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0
            )
            torch.manual_seed(0)
            with torch.device(setup.device):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.save_pretrained(folder)
            del model
            if not setup.stand_in:
                torch.cuda.empty_cache()  # An engine is started on the same GPU.
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(POLICY / name, folder)
        return folder


def _qwen(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 2,
    }  # fmt: skip


def _llama(vocabulary: int, hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 3,
    }  # fmt: skip


CALC = Model("calc policy, 0.9M")
SMOLLM_SHAPED = Model("Llama, 135M", _llama(49152, 576, 1536, 30, 9))
QWEN_SHAPED = Model("Qwen2, 0.5B", _qwen(896, 4864, 24, 14))
LARGE_QWEN_SHAPED = Model("Qwen2, 3B", _qwen(2048, 11008, 36, 16))
STAND_IN = Model("Llama, 0.3M", _llama(2048, 96, 128, 2, 3))


def spec_of(model: Path, dtype: str, lora: bool = False) -> PolicySpec:
    adapter = {"rank": 16, "alpha": 32.0} if lora else None
    return PolicySpec(
        str(model),
        dtype,
        lora=adapter,
        optimizer={"learning_rate": 1e-3},
        algorithm=ALGORITHM,
        algorithm_options=OPTIONS,
    )


@asynccontextmanager
async def started(device: str, run: Path, spec: PolicySpec) -> AsyncIterator[EngineCase]:
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
    engine = TorchEngine(TorchOptions.model_validate({"device": device}), context)
    try:
        yield EngineCase(engine, await engine.start(), context, run)
    finally:
        await engine.stop()


def client_of_engine(upstream: Upstream) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {upstream.api_key}"}
    return httpx.AsyncClient(base_url=upstream.urls[0], headers=headers, timeout=600, trust_env=False)


async def ask(client: httpx.AsyncClient, model: str, count: int, tokens: int) -> list[Row]:
    """Replies of at most so many tokens, asked for at once; each has a seed of its own, and every second is right."""

    async def one(number: int) -> Row:
        question = f"What is {number + 11} plus {7 * number + 5}? " * 6
        body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": tokens}
        body |= {"temperature": 1.0, "seed": number, "logprobs": True, "return_token_ids": True}
        reply = await client.post("chat/completions", json=body)
        return Row.of_reply(reply.raise_for_status().json(), float(number % 2))

    return await asyncio.gather(*map(one, range(count)))
