"""What the parts of the kit share: models, started engines, and the conversations that engines are asked for."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import agl_algorithms.plugin
from agl_core.capture.requests import HEADER_ROLLOUT
from agl_core.protocols import Engine, EngineContext, PolicySpec, Upstream
from agl_core.testing.engines import EngineCase, Row, batch_of
from agl_core.types import Batch
from agl_torch.plugin import TorchEngine, TorchOptions

POLICY = Path(__file__).parents[2] / "examples" / "calc" / "policy"
ALGORITHM, OPTIONS = "grpo", {"beta": 0.0}
Make: TypeAlias = Callable[[EngineContext], Engine]


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
            for name in ("tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(POLICY / name, folder)
            (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(self.shape["vocab_size"])))
        return folder


def _tokenizer(size: int) -> dict[str, Any]:
    """The calc example's, with as many more words as a model has tokens: veRL masks those that it does not know."""
    tokenizer: dict[str, Any] = json.loads((POLICY / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    known = {*vocabulary.values(), *(added["id"] for added in tokenizer["added_tokens"])}
    vocabulary |= {f"w{token}": token for token in range(size) if token not in known}
    return tokenizer


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


def spec_of(model: Path, dtype: str, lora: bool = False, rate: float = 1e-3) -> PolicySpec:
    adapter = {"rank": 16, "alpha": 32.0} if lora else None
    return PolicySpec(
        str(model),
        dtype,
        lora=adapter,
        optimizer={"learning_rate": rate},
        algorithm=ALGORITHM,
        algorithm_options=OPTIONS,
    )


def torch_engine(device: str) -> Make:
    options = TorchOptions.model_validate({"device": device})
    return lambda context: TorchEngine(options, context)


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


def client_of_engine(upstream: Upstream) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {upstream.api_key}"}
    return httpx.AsyncClient(base_url=upstream.urls[0], headers=headers, timeout=600, trust_env=False)


@dataclass(frozen=True)
class Size:
    """How many conversations there are at the same time, and how long they are."""

    conversations: int
    turns: int
    tokens: int
    """Of a reply, at most."""
    sums: int = 6
    """How many times each message of the user asks: 12 or 13 tokens each time."""


@dataclass(frozen=True)
class Conversations:
    """Sampled conversations; each has a call for each of its turns."""

    calls: Sequence[Sequence[Row]]
    seconds: float

    @property
    def sampled(self) -> int:
        """How many tokens."""
        return sum(len(row.response) for rows in self.calls for row in rows)

    @property
    def broken(self) -> int:
        """How many prompts do not begin with the ids of the turn before, prompt and reply."""
        pairs = [pair for rows in self.calls for pair in pairwise(rows)]
        return sum(
            [*one.prompt, *one.response] != list(two.prompt[: len(one.prompt) + len(one.response)])
            for one, two in pairs
        )

    def batch(self, version: int = 0) -> Batch:
        """All calls, of one group; every second conversation was right."""
        rows = [replace(row, value=float(i % 2)) for i, rows in enumerate(self.calls) for row in rows]
        turns = [len(rows) for rows in self.calls]
        return replace(
            batch_of(rows, version=version),
            step=1,
            rollout_N=np.repeat(np.arange(len(turns)), turns),
            group_N=np.zeros(len(rows), np.int64),
            turn_N=np.concatenate([np.arange(count) for count in turns]),
        )


async def converse(client: httpx.AsyncClient, model: str, size: Size) -> Conversations:
    """Conversations of so many turns, sent whole with each call as agents do; each reply has a seed of its own."""

    async def one(number: int) -> list[Row]:
        messages, rows = list[dict[str, Any]](), list[Row]()
        for turn in range(size.turns):
            question = f"What is {number + 11} plus {7 * number + turn + 5}? " * size.sums
            messages.append({"role": "user", "content": question})
            body = {"model": model, "messages": messages, "max_tokens": size.tokens, "temperature": 1.0}
            body |= {"seed": 1000 * turn + number, "logprobs": True, "return_token_ids": True}
            reply = await client.post(
                "chat/completions", json=body, headers={HEADER_ROLLOUT: f"r{size.turns}-{number}/0"}
            )
            answer = reply.raise_for_status().json()
            rows.append(Row.of_reply(answer, 0.0))
            messages.append(answer["choices"][0]["message"])
        return rows

    began = asyncio.get_running_loop().time()
    calls = await asyncio.gather(*map(one, range(size.conversations)))
    return Conversations(calls, asyncio.get_running_loop().time() - began)


@asynccontextmanager
async def watched_memory(setup: Setup) -> AsyncIterator[Callable[[], str]]:
    """Tells the most memory of the GPU that all its processes had until now, in GiB; nothing on a CPU."""
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            free, total = torch.cuda.mem_get_info()
            peak = max(peak, total - free)
            await asyncio.sleep(0.1)

    watching = None if setup.stand_in else asyncio.create_task(watch())
    try:
        yield lambda: f"{peak / 2**30:.1f}" if watching else "-"
    finally:
        if watching:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
