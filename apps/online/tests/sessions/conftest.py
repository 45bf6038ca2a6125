"""A server that records real use, over a real store, in front of the scripted model server: one for each test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agl_core.config.models import SamplingSection
from agl_core.protocols import Upstream
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Annotation, AttemptKey, Call, Mode, Rollout
from agl_online.config import OnlineSection
from agl_online.deployed import fixed_upstream
from agl_online.sessions import Sessions
from agl_online.wire import Purpose
from agl_server.gateway.attempts import Relay, RunSettings
from agl_server.http.keys import Keys
from agl_server.server import LightningServer
from agl_server.store.sqlite import SqliteStore
from agl_server.testing import Stack, running_stack

SAMPLED = RunSettings(SamplingSection(temperature=0.7, max_tokens=512), seed=1, timeout=30, attempts=2)
SETTINGS: dict[str, Any] = {"upstream": "http://unused/v1", "applications": {"shop": 1, "mail": 1}}
KEYS = Keys(secret="a-secret", worker="the-worker", operator="the-operator")


@dataclass
class Deployed:
    stack: Stack
    store: SqliteStore
    model: ScriptedUpstream
    http: httpx.AsyncClient
    source: Sessions

    @property
    def server(self) -> LightningServer:
        return self.stack.server

    def key(self, application: str = "shop", purpose: Purpose = Purpose.APPLICATION) -> str:
        return self.source.keys.of(purpose, application)

    def agent(self, key: str, path: str = "", **headers: str) -> openai.AsyncOpenAI:
        """The official client, as a deployed agent has it."""
        return self.stack.client(api_key=key, base_url=f"{self.server.base_url}{path}/v1", default_headers=headers)

    async def ask(
        self, text: str, name: str | None = None, begun: Any = None, *, application: str = "shop", **headers: str
    ) -> Any:
        """One model call: with an application's key, or with that of a session that was begun."""
        named = {} if name is None else {"x-agl-session": name}
        key, path = (self.key(application), "") if begun is None else (begun["key"], begun["path"])
        completions = self.agent(key, path, **named, **headers).chat.completions
        return await completions.create(model="default", messages=[{"role": "user", "content": text}])

    async def send(self, path: str, key: str, body: Any, **headers: str) -> httpx.Response:
        return await self.http.post(
            f"{self.server.base_url}{path}", json=body, headers={"Authorization": f"Bearer {key}", **headers}
        )

    async def post(self, route: str, key: str, **body: Any) -> httpx.Response:
        return await self.send(f"/agl/v1/{route}", key, body)

    async def begin(self, *, application: str = "shop", **body: Any) -> dict[str, Any]:
        return (await self.post("sessions", self.key(application), **body)).json()

    async def say(self, *, application: str = "shop", **body: Any) -> httpx.Response:
        """Feedback."""
        return await self.post("feedback", self.key(application, Purpose.FEEDBACK), **body)

    async def sessions(self) -> list[Rollout]:
        return await self.store.rollouts(mode=Mode.USE)

    async def calls(self) -> list[Call]:
        return await self.store.calls([AttemptKey(session.id, 0) for session in await self.sessions()])

    async def numbers(self, session: str) -> dict[tuple[str, str | None], float]:
        """The latest numbers on a session, by name and call."""
        return {
            (name, feedback.call): value
            for feedback in await self.feedback(session)
            for name, value in feedback.said["rewards"].items()
        }

    async def feedback(self, session: str) -> list[Annotation]:
        return await self.store.annotations([AttemptKey(session, 0)])

    def counted(self, name: str) -> int:
        return self.server.activity().counters[f"online_{name}"]


@contextlib.asynccontextmanager
async def deployed(folder: Path, *, answering: Relay | None = None, **settings: Any) -> AsyncIterator[Deployed]:
    """It, on the store in this folder; `settings` are those of `[online]`, `answering` is there instead of a server."""
    async with (
        SqliteStore(folder / "store.sqlite") as store,
        ScriptedUpstream() as model,
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
    ):
        upstream = Upstream(urls=(model.url,), models={"default": "served"}, api_key="upstream-key")
        section = OnlineSection(**{**SETTINGS, **settings})
        relay = fixed_upstream(upstream, SAMPLED)
        source = Sessions(section, store, KEYS, answering or relay, run="run", folder=folder)
        async with running_stack(store=store, keys=KEYS, source=source) as stack:
            yield Deployed(stack, store, model, http, source)
        relay.disconnect()


@pytest.fixture
async def use(tmp_path: Path) -> AsyncIterator[Deployed]:
    async with deployed(tmp_path) as running:
        yield running
