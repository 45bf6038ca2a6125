"""Sessions answered by versions of the run's own, over real HTTP; a scripted model server stands for the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from agl_core.config.load import SERVED, LoadedConfig, load
from agl_core.testing.scripts import Hold, Say
from agl_core.testing.upstream import ScriptedUpstream
from agl_online.deployed import DeployedVersions
from agl_online.versions import By, Ledger, State

from ..policies.saved_runs import LoadingEngine
from ..sessions.deployed import Deployed, deployed
from .deployed_runs import decide, make_canary, make_deployed, make_stable


@dataclass
class Bench:
    use: Deployed
    deployed: DeployedVersions
    model: ScriptedUpstream
    engines: list[LoadingEngine]

    async def ask(self, name: str | None, **headers: str) -> int:
        """The version that answers a session, which is said by the scripted reply too."""
        reply = await self.use.ask("Which version?", name, **headers)
        return int(reply.choices[0].message.content.removeprefix("version-"))

    async def ask_many(self, names: Sequence[str]) -> dict[str, int]:
        return dict(zip(names, await asyncio.gather(*map(self.ask, names)), strict=True))


@contextlib.asynccontextmanager
async def bench(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    loaded = load(ledger.run / "config.toml", needs=SERVED)
    engines: list[LoadingEngine] = []

    def engine(config: LoadedConfig, folder: Path) -> LoadingEngine:
        engines.append(LoadingEngine(model.url))
        return engines[-1]

    monkeypatch.setattr("agl_online.deployed.make_engine", engine)
    async with ScriptedUpstream() as model:
        model.answer = lambda received: Say(received.body["model"])
        async with (
            DeployedVersions(ledger.run, loaded, share=0.5).running() as versions,
            deployed(ledger.run, answering=versions) as use,
        ):
            yield Bench(use, versions, model, engines)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_deployed(tmp_path / "calc", 10, 20, 30, 40, 50, 60, 70)


async def test_a_share_of_the_names_gets_the_canary_and_keeps_it(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_canary(ledger, 10)
    names = [f"user-{number}" for number in range(60)]
    async with bench(ledger, monkeypatch) as use:
        first = await use.ask_many(names)
        assert set(first.values()) == {0, 10}
        assert 15 < sum(version == 10 for version in first.values()) < 45, "the share is a half"
        ended = names[:20]
        for name in ended:
            await use.ask(name, **{"x-agl-session-end": "1"})
        assert await use.ask_many(ended) == {name: first[name] for name in ended}, (
            "the next session of a name is drawn alike"
        )

        recorded = {call.version for call in await use.use.calls()}
        assert recorded == {0, 10}
        by_session: dict[str, set[int | None]] = {}
        for call in await use.use.calls():
            by_session.setdefault(call.rollout, set()).add(call.version)
        assert {len(versions) for versions in by_session.values()} == {1}

        decide(ledger, 10, State.ROLLED_BACK, By.CANARY)
        make_canary(ledger, 20)
        await use.deployed.refresh()
        others = [f"other-{number}" for number in range(30)]
        second = await use.ask_many(others)
        assert set(second.values()) == {0, 20}


async def test_a_swap_drops_no_call_and_reaches_open_sessions(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(ledger, monkeypatch) as use:
        hold = Hold(Say("version-0"))
        use.model.script(hold)
        held = asyncio.create_task(use.ask(None))
        await asyncio.wait_for(hold.arrived.wait(), 30)
        assert await use.ask("open") == 0

        make_stable(ledger, 10)
        await use.deployed.refresh()
        assert (await use.ask("new"), await use.ask("open")) == (10, 10)
        assert use.engines[0].steps == [0, 10], "a call under way keeps its version"
        hold.release.set()
        assert await held == 0
        await use.deployed.refresh()
        assert use.engines[0].steps == [10]


async def test_a_rollback_reaches_open_sessions_at_once(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    make_canary(ledger, 10)
    names = [f"user-{number}" for number in range(20)]
    async with bench(ledger, monkeypatch) as use:
        assert set((await use.ask_many(names)).values()) == {0, 10}
        decide(ledger, 10, State.ROLLED_BACK, By.CANARY)
        await use.deployed.refresh()
        assert set((await use.ask_many(names)).values()) == {0}
        assert use.engines[0].steps == [0]

        make_stable(ledger, 20)
        await use.deployed.refresh()
        assert await use.ask("late") == 20
        decide(ledger, 20, State.ROLLED_BACK, By.OPERATOR)
        await use.deployed.refresh()
        assert await use.ask("late") == 0


async def test_a_lost_engine_is_started_again(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    make_stable(ledger, 10)
    async with bench(ledger, monkeypatch) as use:
        assert await use.ask("open") == 10
        use.engines[0].is_lost = True
        await use.deployed.refresh()
        assert len(use.engines) == 2
        assert (await use.ask("open"), use.engines[1].steps) == (10, [10])


async def test_what_cannot_be_loaded_leaves_what_is_served(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(ledger, monkeypatch) as use:
        use.engines[0].fails = [10, 20]
        make_canary(ledger, 10)
        await use.deployed.refresh()
        assert "The canary, version 10, cannot be loaded: The weights cannot be read." in caplog.text
        assert {await use.ask(f"user-{number}") for number in range(20)} == {0}
        decide(ledger, 10, State.ROLLED_BACK, By.CANARY)
        make_stable(ledger, 20)
        await use.deployed.refresh()
        assert "Sessions are answered as before" in caplog.text
        assert await use.ask("another") == 0
        use.engines[0].fails = []
        await use.deployed.refresh()
        assert await use.ask("third") == 20
