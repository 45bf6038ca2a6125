"""Tokens per second and memory of the torch engine."""

from __future__ import annotations

import time

from agl_core.testing.engines import batch_of

from .kit import (
    CALC,
    LARGE_QWEN_SHAPED,
    QWEN_SHAPED,
    SMOLLM_SHAPED,
    STAND_IN,
    Model,
    Setup,
    Table,
    ask,
    client_of_engine,
    spec_of,
    started,
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
    async with started(setup.device, setup.folder / f"{model.name}-{lora}", spec) as engine:
        ready, stats = time.perf_counter() - began, engine.engine.stats
        async with client_of_engine(engine.upstream) as client:
            await ask(client, engine.policy, 8, 16)
            before, began = await stats(), time.perf_counter()
            size = 8 if setup.stand_in else 128
            batch = batch_of(await ask(client, engine.policy, size, 2 * size))
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
