"""Tokens per second of decoding and of updates, and memory, of the torch engine's process."""

from __future__ import annotations

import asyncio
import time

from .engines import Replies, spec_of, started, torch_engine
from .models import CALC, QWEN, SMALL_LLAMA, STAND_IN, Model
from .parts import Setup, Table

COLUMNS = (
    "model", "trained", "dtype", "start, s", "decoded, tokens/s", "updated, tokens/s", "memory, GiB",
    "served and trained: largest difference",
)  # fmt: skip
LORA = {"rank": 16, "alpha": 32.0, "dropout": 0.0}
REPLIES, FEW = Replies(128, 128), Replies(8, 16)
MODELS = ((CALC, "float32"), (SMALL_LLAMA, "bfloat16"), (QWEN, "bfloat16"))
STAND_INS = ((CALC, "float32"), (STAND_IN, "bfloat16"))


def measure(setup: Setup, seconds: float) -> Table:
    rows: list[tuple[str, ...]] = []

    async def measured() -> None:
        async with asyncio.timeout(seconds):
            for each in STAND_INS if setup.stand_in else MODELS:
                for lora in (False, True):
                    rows.append(await one(setup, *each, lora))

    try:
        asyncio.run(measured())
    except TimeoutError:
        if not rows:
            raise
        return Table(COLUMNS, rows, ["The time was over before the others were measured."])
    return Table(COLUMNS, rows)


async def one(setup: Setup, model: Model, dtype: str, lora: bool) -> tuple[str, ...]:
    """The first replies and the first update warm up, and are not counted."""
    wanted = FEW if setup.stand_in else REPLIES
    spec = spec_of(model.folder(setup.folder), dtype, LORA if lora else None)
    began = time.perf_counter()
    async with started(torch_engine(setup), setup.folder / f"{model.name}-{lora}", spec) as running:
        ready = time.perf_counter() - began
        await running.rows(FEW)
        before, began = await running.engine.stats(), time.perf_counter()
        batch = await running.batch(wanted)
        seconds, after = time.perf_counter() - began, await running.engine.stats()
        first = await running.update(batch)
        second = await running.update(batch)
        stats = await running.engine.stats()
    memory = stats["peak_rss_bytes" if setup.stand_in else "peak_gpu_bytes"]
    return (
        model.name,
        "LoRA" if lora else "all weights",
        dtype,
        f"{ready:.1f}",
        f"{(after['tokens_decoded'] - before['tokens_decoded']) / seconds:,.0f}",
        f"{len(batch.tokens_T) / second.metrics['seconds_update']:,.0f}",
        f"{memory / 2**30:.2f}",
        f"{first.metrics['logprob_gap_max']:.1e}",
    )
