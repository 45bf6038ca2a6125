"""Three steps of the veRL engine with vLLM on one GPU: a merged LoRA adapter, offloading, a restart."""

from __future__ import annotations

import asyncio
import os

from agl_verl.engine import VerlEngine
from agl_verl.options import VerlOptions

from .engines import Replies, spec_of
from .models import CALC
from .parts import Setup, Table
from .steps import LORA, RATE, three_steps
from .verl_parity import environment

OPTIONS = {"attention": "sdpa", "offload": True, "serving_memory": 0.3, "max_context": 1024}


def measure(setup: Setup, seconds: float) -> Table:
    os.environ.update(environment())
    options = VerlOptions.model_validate({"device": setup.device, **OPTIONS})

    async def measured() -> Table:
        async with asyncio.timeout(seconds):
            spec = spec_of(CALC.folder(setup.folder), "bfloat16", LORA, RATE)
            return await three_steps(lambda context: VerlEngine(options, context), setup, spec, Replies(16, 64))

    return asyncio.run(measured())
