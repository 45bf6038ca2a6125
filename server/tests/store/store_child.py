"""A process of its own that writes a store: `store_child.py PATH SEED TASKS`.

Puts calls concurrently without end, and prints "CALL-ID CHECKSUM" for each one after its put returned. The
checksum is of the tokens that it made, not of what it stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import sys
from pathlib import Path

import numpy as np

from agl_core.testing import episodes as make
from agl_server.store.sqlite import SqliteStore


async def main(path: Path, seed: int, tasks: int) -> None:
    draw = random.Random(seed)
    generator = np.random.default_rng(seed)
    conversation = [{"role": "system", "content": f"{seed} " * 100}]

    async def put_calls(store: SqliteStore, task: int) -> None:
        for number in range(10**9):
            prompt = generator.integers(0, 2**31, draw.choice([0, 60, 700, 4000]), dtype=np.int32)
            response = generator.integers(0, 2**31, draw.choice([1, 40, 900]), dtype=np.int32)
            logprobs = generator.standard_normal(len(response), dtype=np.float32)
            checksum = hashlib.sha256(prompt.tobytes() + response.tobytes() + logprobs.tobytes()).hexdigest()
            request = {"messages": [*conversation, {"role": "user", "content": checksum}]}
            choice = make.choice(message={"content": checksum}, response_ids=response, logprobs=logprobs)
            names = {"id": f"{seed}-{task}-{number}", "rollout": f"rollout-{seed}-{task}"}
            call = make.call(number, choice, **names, request=request, prompt_ids=prompt)
            await store.put(call)
            os.write(1, f"{call.id} {checksum}\n".encode())

    async with SqliteStore(path) as store:
        await asyncio.gather(*(put_calls(store, task) for task in range(tasks)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
