"""A client tries a call of a session again while the server dies and comes back: it is one call all the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from agl_core.capture.requests import HEADER_RETRIES
from agl_core.config.models import SamplingSection
from agl_core.learning.transitions import counted_calls
from agl_core.plugins import Plugins
from agl_core.protocols import Upstream
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import AttemptKey, Call
from agl_online.config import OnlineSection
from agl_online.deployed import fixed_upstream
from agl_online.sessions import Sessions
from agl_online.wire import HEADER_SESSION, ApplicationKeys, Purpose
from agl_server.gateway.attempts import RunSettings
from agl_server.http.keys import Keys
from agl_server.server import LightningServer
from agl_server.store.sqlite import SqliteStore

KEYS = Keys()
BODY = {"model": "default", "messages": [{"role": "user", "content": "once"}]}
FIRST, AGAIN = {HEADER_RETRIES: "0"}, {HEADER_RETRIES: "1"}


@pytest.mark.parametrize(
    "tries",
    [[FIRST, AGAIN], [FIRST, AGAIN, {HEADER_RETRIES: "2"}]],
    ids=["counted by the SDK", "through two restarts"],
)
async def test_a_call_whose_reply_was_lost_with_the_server_counts_once(
    tmp_path: Path, tries: Sequence[dict[str, str]]
) -> None:
    replies, calls = await ask_each_from_a_new_server(tmp_path, tries)
    counted = await counted_of(tmp_path, calls)
    assert counted == [replies[-1]], "what the agent goes on from is the last reply"
    assert len(calls) == len(tries), "what was sampled before stays on record"
    assert {call.sequence for call in calls} == {0}


async def test_an_equal_call_that_retries_none_counts_too(tmp_path: Path) -> None:
    replies, calls = await ask_each_from_a_new_server(tmp_path, [FIRST, FIRST])
    assert await counted_of(tmp_path, calls) == replies


async def test_of_equal_calls_the_last_one_is_retried(tmp_path: Path) -> None:
    replies, calls = await ask_each_from_a_new_server(tmp_path, [FIRST, FIRST, AGAIN])
    assert await counted_of(tmp_path, calls) == [replies[0], replies[2]], "the first had its reply before the second"


async def ask_each_from_a_new_server(folder: Path, requests: Sequence[dict[str, str]]) -> tuple[list[str], list[Call]]:
    """The replies' ids to requests with these headers, and all that was recorded."""
    replies = []
    async with ScriptedUpstream() as scripted:
        upstream = Upstream((scripted.url,), {"default": "default"}, "key")
        settings = RunSettings(sampling=SamplingSection(), seed=0, timeout=60, attempts=3)
        section = OnlineSection(upstream=scripted.url, applications={"shop": 1})
        for headers in requests:
            async with SqliteStore(folder / "store.sqlite") as store:
                answering = fixed_upstream(upstream, settings)
                source = Sessions(section, store, KEYS, answering, run="run", folder=folder)
                server = LightningServer(store, None, settings, Plugins().hook, keys=KEYS, source=source)
                await server.start()
                replies.append(await ask(server, headers))
                await server.stop(over=False)
                [session] = await store.rollouts()
                calls = await store.calls([AttemptKey(session.id, 0)])
    return replies, calls


async def counted_of(folder: Path, calls: Sequence[Call]) -> list[str]:
    """The ids of the calls that training would see."""
    async with SqliteStore(folder / "store.sqlite", read_only=True) as store:
        [session] = await store.rollouts()
        [attempt] = await store.attempts(session.id)
    return [call.id for call in counted_calls(attempt, calls)]


async def ask(server: LightningServer, headers: dict[str, str]) -> str:
    """The id of the reply, in the session "talk"."""
    key = {
        "Authorization": f"Bearer {ApplicationKeys(KEYS, {'shop': 1}).of(Purpose.APPLICATION, 'shop')}",
        HEADER_SESSION: "talk",
    }
    async with httpx.AsyncClient(trust_env=False) as client:
        reply = await client.post(f"{server.base_url}/v1/chat/completions", json=BODY, headers=headers | key)
    assert reply.status_code == 200
    return str(reply.json()["id"])
