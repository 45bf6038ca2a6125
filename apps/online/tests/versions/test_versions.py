"""Versions of a run: the ledger, `agl versions`, and sessions that they answer over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from agl_core.config.load import SERVED, load
from agl_core.errors import AglError
from agl_core.testing.scripts import Hold, Say
from agl_core.testing.upstream import ScriptedUpstream
from agl_online.cli import versions
from agl_online.deployed import DeployedVersions
from agl_online.policies import Version
from agl_online.versions import DecidedBy, Ledger, LedgerError, State
from agl_server.training.checkpoints import CHECKPOINTS, VERSIONS_FILE, Checkpoints, RunState

from ..policies.saved_runs import LoadingEngine, decide, loading_engines, make_deployed, make_run, promote
from ..sessions.conftest import Deployed, deployed


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return make_deployed(tmp_path / "runs" / "calc", 10, 20, 30)


def states(ledger: Ledger) -> dict[int, State | None]:
    standing = ledger.current()
    return {step: standing.state(step) for step in sorted(standing.decided)}


def agl(*arguments: str) -> str:
    """The command's output; its error is raised here."""
    result = CliRunner().invoke(versions, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_version_goes_from_candidate_to_stable_and_the_one_before_retires(ledger: Ledger) -> None:
    promote(ledger, 10, State.CANARY)
    assert states(ledger) == {0: State.STABLE, 10: State.CANARY}
    assert ledger.current().serving == [0, 10]

    decide(ledger, 10, State.STABLE, DecidedBy.CANARY, {"canary/reward": 0.5, "nothing": float("nan")})
    decide(ledger, 20, State.CANDIDATE, DecidedBy.TRAINING)
    decide(ledger, 20, State.REJECTED)

    assert states(ledger) == {0: State.RETIRED, 10: State.STABLE, 20: State.REJECTED}
    decisions = Ledger(ledger.run).decisions()
    assert [(decision.step, decision.state, decision.by) for decision in decisions[:2]] == [
        (0, State.STABLE, DecidedBy.START),
        (10, State.CANDIDATE, DecidedBy.TRAINING),
    ]
    assert decisions[4].figures == {"canary/reward": 0.5}, "what is no number is left out"
    assert Version.find("calc@stable").step == 10


def test_an_operator_promotes_rolls_back_and_sees_why(ledger: Ledger) -> None:
    promote(ledger, 10, State.CANARY)
    assert "calc@10 is the stable version" in agl("promote", "calc", "--reason", "Looks good.")
    promote(ledger, 20, State.PASSED)
    assert "calc@20 is the stable version" in agl("promote", "calc@20")
    listed: list[dict[str, Any]] = json.loads(agl("list", "calc", "--json"))
    assert [(version["name"], version["state"]) for version in listed] == [
        ("calc@0", "retired"), ("calc@10", "retired"), ("calc@20", "stable"),
    ]  # fmt: skip
    assert [decision["state"] for decision in listed[1]["decisions"]] == ["candidate", "passed", "canary", "stable"]
    table = agl("list", "calc")
    assert [word for word in ("calc@10", "retired", "operator", "Looks good.") if word not in table] == []

    assert "calc@20 is rolled back" in agl("rollback", "calc")
    assert Version.find("calc@stable").step == 10
    assert "calc@10 is rolled back" in agl("rollback", "calc@10")
    assert Version.find("calc@stable").checkpoint is None
    assert states(ledger) == {0: State.STABLE, 10: State.ROLLED_BACK, 20: State.ROLLED_BACK}
    assert decide(ledger, 20, State.STABLE, DecidedBy.OPERATOR).stable == 20, "an operator may take it back"


@pytest.mark.parametrize(
    ("step", "state", "by", "says"),
    [
        (40, State.CANDIDATE, DecidedBy.TRAINING, "There is no checkpoint of step 40"),
        (20, State.CANARY, DecidedBy.CANARY, "The gate did not pass it"),
        (20, State.STABLE, DecidedBy.OPERATOR, "The gate did not pass it"),
        (30, State.STABLE, DecidedBy.CANARY, "It is passed and not the canary any more"),
        (30, State.CANARY, DecidedBy.CANARY, "Version 10 is the canary; there is one at a time"),
        (10, State.CANDIDATE, DecidedBy.TRAINING, "It is canary now, and answers sessions"),
        (0, State.STABLE, DecidedBy.OPERATOR, "It is stable already"),
        (0, State.STABLE, DecidedBy.START, "Version 0 is stable already"),
        (0, State.ROLLED_BACK, DecidedBy.CANARY, "It is stable and not the canary any more"),
        (0, State.ROLLED_BACK, DecidedBy.OPERATOR, "nothing to roll back to"),
        (30, State.ROLLED_BACK, DecidedBy.OPERATOR, "It is passed, and answers no sessions"),
        (20, State.ROLLED_BACK, DecidedBy.OPERATOR, "It is unknown, and answers no sessions"),
    ],
)
def test_what_makes_no_sense_is_refused_and_not_written(
    ledger: Ledger, step: int, state: State, by: DecidedBy, says: str
) -> None:
    promote(ledger, 10, State.CANARY)
    promote(ledger, 30, State.PASSED)
    before = ledger.file.read_bytes()
    with pytest.raises(LedgerError, match=says):
        decide(ledger, step, state, by)
    assert ledger.file.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("promote", "calc@99"), "no checkpoint step-000099"),
        (("promote", "calc"), "none waits"),
        (("rollback", "plain"), "never deployed"),
        (("rollback", "calk@20"), "calk is not a run's folder"),
    ],
)
def test_mistakes_of_the_operator_are_said(
    ledger: Ledger, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    make_run(tmp_path / "runs" / "plain", {5: None})
    with pytest.raises(AglError, match=says):
        agl(*arguments)


def test_checkpoints_that_are_needed_outlive_later_ones(tmp_path: Path) -> None:
    ledger = make_deployed(tmp_path / "calc", 10, 20, 30, 40)
    promote(ledger, 10, State.STABLE)
    promote(ledger, 20, State.STABLE)
    promote(ledger, 30, State.CANARY)
    checkpoints = Checkpoints(ledger.run / CHECKPOINTS, keep=1)
    part = checkpoints.begin(50)
    (part / "default" / "model").mkdir(parents=True)
    checkpoints.commit(part, RunState(step=50))

    assert [path.name for path in checkpoints.all()] == [f"step-0000{step}" for step in (10, 20, 30, 50)]
    decide(ledger, 30, State.ROLLED_BACK, DecidedBy.CANARY)
    assert [path.name for path in checkpoints.prune()] == ["step-000030"]


def test_a_half_written_line_was_never_decided(ledger: Ledger) -> None:
    promote(ledger, 10, State.CANARY)
    whole = ledger.file.read_bytes()
    promoted = orjson.dumps({"step": 10, "state": "stable", "by": "canary", "reason": "", "time": 1.0})
    for length in (1, len(promoted) // 2, len(promoted)):
        ledger.file.write_bytes(whole + promoted[:length])
        assert ledger.current().canary == 10
        assert Version.find("calc@stable").step == 0

    decide(ledger, 10, State.ROLLED_BACK, DecidedBy.CANARY)

    assert ledger.file.read_bytes().startswith(whole)
    assert [decision.state for decision in ledger.decisions()][-2:] == [State.CANARY, State.ROLLED_BACK]
    ledger.file.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(LedgerError, match=f"Line 1 of .*{VERSIONS_FILE} is no decision"):
        ledger.current()


WRITER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from agl_online.versions import DecidedBy, Decision, Ledger, LedgerError, State

    ledger, step, turns = Ledger(Path(sys.argv[1])), int(sys.argv[2]), 0
    while turns < 10:
        try:
            ledger.record(Decision(step, State.CANARY, DecidedBy.CANARY, "x" * 2000))
        except LedgerError:  # The other writer has its turn.
            continue
        ledger.record(Decision(step, State.ROLLED_BACK, DecidedBy.CANARY, "x" * 2000))
        turns += 1
""")


def test_two_writers_never_make_two_canaries(ledger: Ledger) -> None:
    for step in (10, 20):
        promote(ledger, step, State.PASSED)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(ledger.run), str(step)]) for step in (10, 20)]
    assert [writer.wait(60) for writer in writers] == [0, 0]

    decisions = ledger.decisions()[5:]
    for canary, rolled_back in zip(decisions[::2], decisions[1::2], strict=True):
        assert (canary.state, rolled_back.state) == (State.CANARY, State.ROLLED_BACK)
        assert canary.step == rolled_back.step
    assert len(decisions) == 40


@dataclass
class Versions:
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


@pytest.fixture
def calc(tmp_path: Path) -> Ledger:
    return make_deployed(tmp_path / "calc", 10, 20, 30, 40, 50, 60, 70)


@contextlib.asynccontextmanager
async def serving(calc: Ledger) -> AsyncIterator[Versions]:
    loaded = load(calc.run / "config.toml", needs=SERVED)
    async with (
        loading_engines("agl_online.deployed") as (model, engines),
        DeployedVersions(calc.run, loaded, share=0.5).running() as versions,
        deployed(calc.run, answering=versions) as use,
    ):
        yield Versions(use, versions, model, engines)


async def test_a_share_of_the_names_gets_the_canary_and_keeps_it(calc: Ledger) -> None:
    promote(calc, 10, State.CANARY)
    names = [f"user-{number}" for number in range(60)]
    async with serving(calc) as use:
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

        decide(calc, 10, State.ROLLED_BACK, DecidedBy.CANARY)
        promote(calc, 20, State.CANARY)
        await use.deployed.refresh()
        assert set((await use.ask_many(names)).values()) == {0, 20}, "open sessions too"
        assert use.engines[0].steps == [0, 20]


async def test_a_swap_drops_no_call_and_reaches_open_sessions(calc: Ledger) -> None:
    async with serving(calc) as use:
        hold = Hold(Say("version-0"))
        use.model.script(hold)
        held = asyncio.create_task(use.ask(None))
        await asyncio.wait_for(hold.arrived.wait(), 30)
        assert await use.ask("open") == 0

        promote(calc, 10, State.STABLE)
        await use.deployed.refresh()
        assert (await use.ask("new"), await use.ask("open")) == (10, 10)
        assert use.engines[0].steps == [0, 10], "a call under way keeps its version"
        hold.release.set()
        assert await held == 0
        await use.deployed.refresh()
        assert use.engines[0].steps == [10]


async def test_a_lost_engine_is_started_again(calc: Ledger) -> None:
    promote(calc, 10, State.STABLE)
    async with serving(calc) as use:
        assert await use.ask("open") == 10
        use.engines[0].is_lost = True
        await use.deployed.refresh()
        assert len(use.engines) == 2
        assert (await use.ask("open"), use.engines[1].steps) == (10, [10])


async def test_what_cannot_be_loaded_leaves_what_is_served(calc: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(calc) as use:
        use.engines[0].fails = [10, 20]
        promote(calc, 10, State.CANARY)
        await use.deployed.refresh()
        assert "The canary, version 10, cannot be loaded: The weights cannot be read." in caplog.text
        assert {await use.ask(f"user-{number}") for number in range(20)} == {0}
        decide(calc, 10, State.ROLLED_BACK, DecidedBy.CANARY)
        promote(calc, 20, State.STABLE)
        await use.deployed.refresh()
        assert "Sessions are answered as before" in caplog.text
        assert await use.ask("another") == 0
        use.engines[0].fails = []
        await use.deployed.refresh()
        assert await use.ask("third") == 20
