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
from agl_core.types import AttemptKey

KILLS = 10
ROLLOUTS, CLIENTS = 16, 32

SERVER = f"""
import asyncio, json, sys
from pathlib import Path
from agl_core.store.sqlite import SqliteStore
from agl_core.testing.server import running_stack

async def serve(path):
    async with SqliteStore(Path(path)) as store, running_stack(store=store) as stack:
        keys = [await stack.lease() for _ in range({ROLLOUTS})]
        print(json.dumps([[stack.url(key), stack.key(key)] for key in keys]), flush=True)
        await asyncio.Event().wait()

asyncio.run(serve(sys.argv[1]))
"""


async def talk(session: aiohttp.ClientSession, url: str, key: str, number: int, log: list[dict[str, Any]]) -> None:
    """Call the gateway until it is gone, noting every reply that came back whole."""
    url, headers = f"{url}/chat/completions", {"Authorization": f"Bearer {key}"}
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
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, store, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    attempts = json.loads(await server.stdout.readline())
    log: list[dict[str, Any]] = []
    enough = chance.randint(20, 200)
    async with aiohttp.ClientSession() as session:
        clients = [asyncio.create_task(talk(session, *attempts[n % ROLLOUTS], n, log)) for n in range(CLIENTS)]
        while len(log) < enough:
            for client in clients:
                if client.done():
                    client.result()
            await asyncio.sleep(0.001)
        server.send_signal(signal.SIGKILL)
        await server.wait()
        await asyncio.gather(*clients)
    return log


@pytest.mark.storm
async def test_every_acknowledged_call_survives_the_kill_of_the_server(tmp_path: Path, chance: random.Random) -> None:
    for number in range(KILLS):
        path = tmp_path / f"{number}.sqlite"
        log = await acknowledged_before_kill(path, chance)
        async with SqliteStore(path) as store:
            keys = [AttemptKey(rollout.id, 0) for rollout in await store.rollouts()]
            calls = {call.id: call for call in await store.calls(keys)}
        assert len({entry["id"] for entry in log}) == len(log)
        for entry in log:
            call = calls[entry["id"]]
            [choice] = call.choices
            assert call.prompt_ids is not None
            assert choice.response_ids is not None
            assert choice.logprobs is not None
            assert call.prompt_ids.tolist() == list(json.dumps(entry["messages"]).encode())
            assert choice.response_ids.tolist() == [*entry["content"].encode(), END_TOKEN]
            assert len(choice.logprobs) == len(choice.response_ids)
            assert call.request["messages"] == entry["messages"]
