"""Every reply that a client got is in the store, token by token, after the server was killed under load."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agl_core.store.sqlite import SqliteStore
from agl_core.testing.upstream import END_TOKEN
from agl_core.types import AttemptKey, Call

HERE = Path(__file__).parent
KILLS = 10
CLIENTS = 32


async def talk(session: aiohttp.ClientSession, ready: dict[str, Any], number: int, log: list[dict[str, Any]]) -> None:
    """Call the gateway until it is gone, noting every reply that came back whole."""
    path, key = ready["attempts"][number % len(ready["attempts"])]
    url, headers = f"{ready['url']}{path}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
    turn = 0
    while True:
        messages = [{"role": "user", "content": f"client {number} turn {turn}"}]
        try:
            async with session.post(url, json={"model": "default", "messages": messages}, headers=headers) as response:
                reply = await response.json()
        except (aiohttp.ClientError, ConnectionError, json.JSONDecodeError):
            return
        if response.status == 503:
            return
        assert response.status == 200, reply
        log.append({"id": reply["id"], "messages": messages, "content": reply["choices"][0]["message"]["content"]})
        turn += 1


async def acknowledged_before_kill(store: Path, chance: random.Random) -> list[dict[str, Any]]:
    """Start a server, talk to it from many clients, kill it at a random moment."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, HERE / "killable_server.py", store, stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    ready = json.loads(await server.stdout.readline())
    log: list[dict[str, Any]] = []
    enough = chance.randint(20, 200)
    async with aiohttp.ClientSession() as session:
        clients = [asyncio.create_task(talk(session, ready, n, log)) for n in range(CLIENTS)]
        while len(log) < enough:
            for client in clients:
                if client.done():
                    client.result()
            await asyncio.sleep(0.001)
        server.send_signal(signal.SIGKILL)
        await server.wait()
        await asyncio.gather(*clients)
    return log


async def recorded(store: Path) -> dict[str, Call]:
    async with SqliteStore(store) as reopened:
        keys = [AttemptKey(rollout.id, 0) for rollout in await reopened.rollouts()]
        return {call.id: call for call in await reopened.calls(keys)}


@pytest.mark.storm
async def test_every_acknowledged_call_survives_the_kill_of_the_server(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    store = tmp_path / "store.sqlite"
    log: list[dict[str, Any]] = []
    for _ in range(KILLS):
        log += await acknowledged_before_kill(store, chance)
        calls = await recorded(store)
        assert len({entry["id"] for entry in log}) == len(log)
        for entry in log:
            call = calls[entry["id"]]
            assert call.prompt_ids is not None
            assert call.choices[0].response_ids is not None
            assert call.choices[0].logprobs is not None
            assert call.prompt_ids.tolist() == list(json.dumps(entry["messages"]).encode())
            assert call.choices[0].response_ids.tolist() == [*entry["content"].encode(), END_TOKEN]
            assert len(call.choices[0].logprobs) == len(call.choices[0].response_ids)
            assert call.request["messages"] == entry["messages"]
