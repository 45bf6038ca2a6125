"""Effects of how real use is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx

from agl_core.cli.screen import Screen
from agl_core.config import LoadedConfig
from agl_core.server import Keys, LightningServer
from agl_core.server.keys import RolloutSource
from agl_core.store.interface import ErasableStore, Store
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.training.server import local_server, new_run_dir, run_settings
from agl_core.types import AttemptKey, Call, Mode
from agl_online.cli.serve import _upstream
from agl_online.config import online_section
from agl_online.keys import ApplicationKeys
from agl_online.sessions import Sessions, fixed_upstream, sessions_of

from .settings_bench import Bench, Effect, Given

MODEL, OTHER = "http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"
"""Stand for the addresses of two model servers, which are known when they run."""
IDLE = 0.1
"""Seconds, more than the `idle_minutes` that are set."""


class Use:
    """A server in use, and the two model servers."""

    def __init__(
        self, server: LightningServer, sessions: Sessions, model: ScriptedUpstream, other: ScriptedUpstream
    ) -> None:
        self.server, self.sessions, self.model, self.other = server, sessions, model, other

    async def ask(self, key: str | None = None) -> int:
        """The status of a model call."""
        headers = {"Authorization": f"Bearer {key or self.sessions.keys.of_application('shop')}"}
        headers |= {"x-agl-session-end": "1", "x-agl-session": "talk"}
        async with httpx.AsyncClient(trust_env=False) as client:
            body = {"model": "any", "messages": [{"role": "user", "content": "I am ada@example.org"}]}
            reply = await client.post(f"{self.server.base_url}/v1/chat/completions", json=body, headers=headers)
        return reply.status_code

    @property
    def store(self) -> ErasableStore:
        store = self.server.store
        assert isinstance(store, ErasableStore)
        return store

    async def calls(self) -> list[Call]:
        sessions = await self.store.rollouts(mode=Mode.USE)
        return await self.store.calls([AttemptKey(each.id, 0) for each in sessions])


def using(
    look: Callable[[Use], Awaitable[Any]], *, restarted: bool = False
) -> Callable[[Bench, Given], Awaitable[Any]]:
    """Look at a server that has answered a call, or at its next one."""

    async def observe(bench: Bench, given: Given) -> Any:
        os.environ["MODEL_KEY"] = "the-key-of-the-model"
        try:
            async with ScriptedUpstream() as model, ScriptedUpstream() as other:
                other.models = ["served", "second"]
                address = {MODEL: model.url, OTHER: other.url}
                named = {
                    key: address.get(value, value) if isinstance(value, str) else value for key, value in given.items()
                }
                loaded = bench.load(named)
                run_dir = new_run_dir(loaded)
                async with _serving(loaded, run_dir, model, other) as use:
                    assert await use.ask() == 200
                    if not restarted:
                        return await look(use)
                    [session] = await use.store.rollouts(mode=Mode.USE)
                    while not (ended := (await use.store.attempts(session.id))[0]).ended:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    await use.store.put(replace(ended, ended=time.time() - 2 * 86_400))
                async with _serving(loaded, run_dir, model, other) as use:
                    return await look(use)
        finally:
            os.environ.pop("MODEL_KEY", None)

    return observe


@contextlib.asynccontextmanager
async def _serving(
    loaded: LoadedConfig, run_dir: Any, model: ScriptedUpstream, other: ScriptedUpstream
) -> AsyncIterator[Use]:
    upstream = await asyncio.to_thread(_upstream, online_section(loaded), Screen())
    made: list[RolloutSource] = []
    sessions_of_run = sessions_of(
        loaded, run_dir, fixed_upstream(upstream, run_settings(loaded.config)), lambda _: None
    )

    async def source(store: Store, keys: Keys) -> RolloutSource:
        made.append(await sessions_of_run(store, keys))
        return made[-1]

    async with local_server(loaded, run_dir, source) as server:
        [sessions] = made
        assert isinstance(sessions, Sessions)
        yield Use(server, sessions, model, other)


async def who_answered(use: Use) -> tuple[bool, bool]:
    return bool(use.model.received), bool(use.other.received)


async def key_that_came(use: Use) -> Any:
    return use.model.received[-1].headers["Authorization"]


async def model_that_was_asked(use: Use) -> Any:
    return use.other.received[-1].body["model"]


async def takes_keys_of_number_one(use: Use) -> int:
    return await use.ask(ApplicationKeys(use.server.keys, {"shop": 1}).of_application("shop"))


async def ends_without_calls(use: Use) -> bool:
    sessions = use.sessions
    await sessions.begin_durably("shop", "idle", recorded=True)
    await asyncio.sleep(IDLE)
    await sessions.look()
    return not sessions.open


async def is_removed(use: Use) -> bool:
    await use.sessions.look()
    return not await use.store.rollouts(mode=Mode.USE)


async def stored(use: Use) -> list[Any]:
    return [call.request["messages"][0]["content"] for call in await use.calls()]


WHAT_IS_STORED = using(stored)

GIVEN: Given = {
    "online.upstream": MODEL,
    "online.applications": {"shop": 1},
    "online.min_free_gib": 0.0,
}
OFTEN: Given = {**GIVEN, "online.idle_minutes": 0.01}

EFFECTS: Mapping[str, Effect] = {
    "online.upstream": Effect(using(who_answered), {"online.upstream": OTHER}, {**GIVEN, "online.model": "served"}),
    "online.upstream_key_env": Effect(using(key_that_came), {"online.upstream_key_env": "MODEL_KEY"}, GIVEN),
    "online.model": Effect(
        using(model_that_was_asked),
        {"online.model": "second"},
        {**GIVEN, "online.upstream": OTHER, "online.model": "served"},
    ),
    "online.applications": Effect(using(takes_keys_of_number_one), {"online.applications": {"shop": 2}}, GIVEN),
    "online.idle_minutes": Effect(using(ends_without_calls), {"online.idle_minutes": 0.001}, GIVEN),
    "online.redact": Effect(WHAT_IS_STORED, {"online.redact": ["email"]}, GIVEN),
    "online.redactors": Effect(WHAT_IS_STORED, {"online.redactors": {"shouted": {}}}, GIVEN),
    "online.keep_days": Effect(using(is_removed, restarted=True), {"online.keep_days": 1.0}, OFTEN),
    "online.min_free_gib": Effect(WHAT_IS_STORED, {"online.min_free_gib": 1e9}, GIVEN),
}
