"""Tokens per second and memory: of the torch engine, of vLLM behind the chat layer, and of steps of the veRL engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import numpy as np
import torch

from agl_algorithms.prepared import lineages
from agl_chat.api import ModelServer, create_app
from agl_chat.backends import VllmBackend
from agl_chat.conversation import load_text

from .agreement import BOUNDS, Served
from .kit import (
    CALC,
    LARGE_QWEN_SHAPED,
    QWEN_SHAPED,
    SMOLLM_SHAPED,
    STAND_IN,
    Conversations,
    Make,
    Model,
    Setup,
    Size,
    Table,
    client_of_engine,
    converse,
    spec_of,
    started,
    torch_engine,
    watched_memory,
)


async def speed(setup: Setup) -> Table:
    """Tokens per second of decoding and of updates, and memory, of the torch engine's process."""
    cases = [(CALC, "float32", False), (STAND_IN, "bfloat16", False), (STAND_IN, "bfloat16", True)]
    if not setup.stand_in:
        cases = [
            (CALC, "float32", False),
            (SMOLLM_SHAPED, "bfloat16", False),
            (QWEN_SHAPED, "bfloat16", False),
            (QWEN_SHAPED, "bfloat16", True),
            (LARGE_QWEN_SHAPED, "bfloat16", True),
        ]
    rows, beyond = [], []
    for model, dtype, lora in cases:
        trained = "LoRA" if lora else "all weights"
        try:
            figures = await speed_of(setup, model, dtype, lora)
        except Exception as error:  # A model may be too large for a GPU; the others are measured.
            beyond.append(f"{model.name}, {trained}: {type(error).__name__}: {str(error).strip()}")
            continue
        rows.append((model.name, trained, dtype, *figures))
    columns = (
        "model", "trained", "dtype", "start, s", "decoded, tokens/s", "updated, tokens/s", "memory, GiB",
        "served and trained: largest difference",
    )  # fmt: skip
    return Table(columns, rows, beyond)


async def speed_of(setup: Setup, model: Model, dtype: str, lora: bool) -> tuple[str, ...]:
    """The first replies and the first update warm up, and are not counted."""
    began = time.perf_counter()
    spec = spec_of(model.folder(setup), dtype, lora)
    async with started(torch_engine(setup.device), setup.folder / f"{model.name}-{lora}", spec) as engine:
        ready, stats = time.perf_counter() - began, engine.engine.stats
        async with client_of_engine(engine.upstream) as client:
            await converse(client, engine.policy, Size(8, 1, 16))
            before, began = await stats(), time.perf_counter()
            size = Size(8, 1, 16) if setup.stand_in else Size(128, 1, 128)
            batch = (await converse(client, engine.policy, size)).batch(await engine.version())
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


async def vllm_turns(setup: Setup) -> Table:
    """Conversations of five turns with vLLM behind the chat layer, which keeps the ids of earlier turns."""
    model, dtype = (CALC, "float32") if setup.stand_in else (QWEN_SHAPED, "bfloat16")
    folder, context_length = model.folder(setup), 1024 if setup.stand_in else 4096
    size = Size(4, 5, 16, 2) if setup.stand_in else Size(128, 5, 128)
    text, began = load_text(str(folder)), time.perf_counter()
    async with watched_memory(setup) as memory, vllm(setup, str(folder), dtype, context_length) as url:
        ready = time.perf_counter() - began
        async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as server:
            app = create_app(
                {"m": ModelServer("m", text, context_length)}, VllmBackend(server, text.eos_ids), api_key="key"
            )
            transport, headers = httpx.ASGITransport(app), {"authorization": "Bearer key"}
            async with httpx.AsyncClient(
                transport=transport, base_url="http://chat/v1", headers=headers, timeout=None
            ) as client:
                await converse(client, "m", Size(4, 2, 16))
                talk = await converse(client, "m", size)
        used = memory()
    some = Conversations(talk.calls[:8], talk.seconds).batch()
    served = Served.of(folder, setup.device, dtype, some)
    beyond = [f"{talk.broken} prompts do not continue the ids of the turn before."] if talk.broken else []
    most = BOUNDS[dtype][0]
    if not served.mean <= most:
        beyond.append(f"Log-probabilities are {served.mean:.1e} apart on average, which may be at most {most:g}.")
    later = sum(len(rows) - 1 for rows in talk.calls)
    columns = (
        "model", "dtype", "start, s", "conversations, turns", "prompts that continue the ids before",
        "sampled, tokens/s", "memory, GiB", *Served.COLUMNS,
    )  # fmt: skip
    row = (
        model.name, dtype, f"{ready:.0f}", f"{size.conversations}, {size.turns}", f"{later - talk.broken} of {later}",
        f"{talk.sampled / talk.seconds:,.0f}", used, *served.cells,
    )  # fmt: skip
    return Table(columns, [row], beyond)


@asynccontextmanager
async def vllm(setup: Setup, model: str, dtype: str, context_length: int) -> AsyncIterator[str]:
    """A vLLM server's base URL, until the block ends."""
    from agl_verl.environment import variables

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--max-model-len", str(context_length)),
        *("--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--enable-prompt-tokens-details"),
        *(("--enforce-eager",) if setup.stand_in else ("--gpu-memory-utilization", "0.5")),
    )
    engines = variables(cpu=setup.stand_in, api_key="", deterministic=False, cache_mib=1024)
    log = setup.folder / "vllm.log"
    with log.open("w") as output:
        server = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, env={**os.environ, **engines}, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                try:
                    (await client.get(f"{url}/health")).raise_for_status()
                    break
                except httpx.TransportError:
                    if server.returncode is not None:
                        raise RuntimeError(f"vLLM ended: {log.read_text()[-2000:]}") from None
                    await asyncio.sleep(0.5)
        yield url
    finally:
        if server.returncode is None:
            os.killpg(server.pid, signal.SIGTERM)  # Its workers too.
            await server.wait()


async def verl_steps(setup: Setup) -> Table:
    """Steps of the veRL engine with vLLM on one GPU: conversations, a LoRA adapter, offloading, a restart."""
    from agl_verl.options import VerlOptions
    from agl_verl.plugin import VerlEngine

    # agl's part of veRL's workers: used from source, it has no entry point.
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "agl_verl.verl_plugin")

    def make(context_length: int) -> Make:
        options = VerlOptions.model_validate(
            {"device": setup.device, "attention": "sdpa", "offload": True, "serving_memory": 0.3}
            | {"tokens_per_micro_batch": 8192, "max_context": context_length}
        )
        return lambda context: VerlEngine(options, context)

    dtype = "bfloat16"
    table = await steps(make(1024), setup, CALC, dtype, [sizes(16, 8), sizes(16, 8)[:1]])
    if setup.stand_in:
        return table
    torch.cuda.empty_cache()
    larger = await steps(make(4096), setup, QWEN_SHAPED, dtype, [sizes(64, 64, 5)])
    return Table(table.columns, [*table.rows, *larger.rows], [*table.beyond, *larger.beyond])


def sizes(conversations: int, tokens: int, sums: int = 1) -> list[Size]:
    """Of two steps: conversations of 5 and of 20 turns."""
    return [Size(conversations, turns, tokens, sums) for turns in (5, 20)]


LARGEST_MEAN = 0.02
"""Difference of probabilities in serving and in training: rounding to bfloat16 explains less, a forgotten adapter makes
it many times as much."""


async def steps(make: Make, setup: Setup, model: Model, dtype: str, starts: Sequence[Sequence[Size]]) -> Table:
    """Updates of a LoRA adapter on conversations, in several processes, each of which goes on where the last one ended.

    At its learning rate two updates change a tiny policy so much that serving its base would be noticed.
    """
    spec = spec_of(model.folder(setup), dtype, lora=True, rate=4e-3)
    rows, beyond, checkpoint = [], list[str](), setup.folder / f"{model.name}-checkpoint"
    step = 0
    for number, start in enumerate(starts):
        run = setup.folder / f"{model.name}-{number}"
        async with watched_memory(setup) as memory, started(make, run, spec) as engine:
            if number:
                await engine.engine.load(checkpoint)
            for size in start:
                step += 1
                async with client_of_engine(engine.upstream) as client:
                    talk = await converse(client, engine.upstream.models[engine.policy], size)
                batch = talk.batch(await engine.version())
                began = time.perf_counter()
                result = await engine.update(batch)
                seconds, metrics = time.perf_counter() - began, result.metrics
                chains = lineages(batch, np.arange(len(batch)))
                lengths_N = np.diff(batch.offsets)
                by_lineage = sum(int(lengths_N[chain[-1]]) for chain in chains)
                rows.append(
                    (
                        model.name,
                        f"{step}, resumed" if number and size is start[0] else str(step),
                        f"{len(batch)} calls of {size.turns} turns in {len(chains)} rows",
                        f"{len(batch.tokens_T):,}",
                        f"{by_lineage:,}",
                        f"{talk.sampled / talk.seconds:,.0f}",
                        f"{by_lineage / seconds:,.0f}",
                        memory(),
                        f"{metrics['grad_norm']:.2e}",
                        f"{metrics['logprob_gap_max']:.1e}",
                        f"{metrics['prob_gap_mean']:.1e}",
                    )
                )
                if result.version != step:
                    beyond.append(f"{model.name}: step {step} made version {result.version}.")
                if talk.broken:
                    beyond.append(f"{model.name}, step {step}: {talk.broken} prompts do not continue the ids before.")
                if not metrics["prob_gap_mean"] <= LARGEST_MEAN:
                    beyond.append(
                        f"{model.name}, step {step}: probabilities in serving and in training differ by "
                        f"{metrics['prob_gap_mean']:.3f} on average, which may be at most {LARGEST_MEAN:g}."
                    )
            await engine.engine.save(checkpoint)
    columns = (
        "model", "step", "conversations", "tokens of all calls", "of the rows", "sampled, tokens/s",
        "trained, tokens of rows/s", "memory, GiB", "gradient norm",
        "served and trained: largest difference of log-probabilities", "mean of probabilities",
    )  # fmt: skip
    return Table(columns, rows, beyond)
