"""An engine's process and the run's side of it: real processes and pipes, an engine that answers by a script."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_core.errors import CheckpointError, ConfigError, EngineError
from agl_core.protocols import EngineContext, PolicySpec
from agl_core.testing.engines import Row, batch_of
from agl_server.engines.host import ProcessEngine

from .host_child import Script

BATCH = batch_of([Row(prompt=[1, 2], response=[3], logprobs=[-0.25], value=1.0)])


class ScriptedEngine(ProcessEngine):
    module = "host_child"

    def remedy(self, lines: Sequence[str], exit_code: int | None) -> str | None:
        if any("no such luck" in line for line in lines):
            return "Try again."
        return "Add memory." if exit_code == -9 else None


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineContext:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return EngineContext(tmp_path / "run", 3, {"default": PolicySpec(str(tmp_path))}, False, (), "secret")


@pytest.fixture
async def start_engine(context: EngineContext) -> Any:
    """Makes and starts an engine that follows a script."""
    engines = []

    async def start(**script: Any) -> ScriptedEngine:
        engines.append(ScriptedEngine(Script(**script), context))
        await engines[-1].start()
        return engines[-1]

    yield start
    for engine in engines:
        await engine.stop()


async def update(engine: ScriptedEngine, progress: Any = None) -> Any:
    return await engine.update("default", BATCH, progress)


async def begin_update(engine: ScriptedEngine) -> asyncio.Task[Any]:
    """An update that has begun and waits."""
    begun = asyncio.Event()
    updating = asyncio.create_task(update(engine, lambda _: begun.set()))
    await begun.wait()
    return updating


@pytest.mark.parametrize("of_the_run", [None, "ACTIVE"])
async def test_a_start_says_its_stages_and_where_it_serves_and_everything_crosses_exactly(
    context: EngineContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_the_run: str | None
) -> None:
    monkeypatch.delenv("WAITING", raising=False)
    if of_the_run is not None:
        monkeypatch.setenv("WAITING", of_the_run)
    monkeypatch.setattr(ScriptedEngine, "environment", {"WAITING": "PASSIVE"})
    stages: list[tuple[str, float]] = []
    shares: list[float] = []
    engine = ScriptedEngine(Script(stages=("Ray", "the weights")), context)
    engine.report_stages(lambda stage, seconds: stages.append((stage, seconds)))
    try:
        upstream = await engine.start()
        assert (upstream.urls, upstream.models) == (("http://127.0.0.1:9/v1",), {"default": "default"})
        assert (upstream.api_key, upstream.context_length) == ("secret", 77)
        result = await update(engine, shares.append)
        assert (result.version, result.metrics, result.dropped) == (5, {"loss": 1 / 3}, (None,))
        assert (result.advantage_N.dtype, result.advantage_N.tolist(), shares) == (np.float64, [0.1 + 0.2], [1.0])
        stats = dict(await engine.stats())
        assert stats.pop("peak_rss_bytes") > 2**20, "of the process, which the engine itself does not count"
        assert (await engine.versions(), stats) == ({"default": 5}, {"tokens_decoded": 5.0, "seed": 3})
        with pytest.raises(EngineError, match="does not support 'unload_policy'"):
            await engine.unload_policy("default")
        monkeypatch.chdir(tmp_path)
        await engine.save(Path("."))
        assert (tmp_path / "saved").read_text() == str(tmp_path)
        with pytest.raises(CheckpointError) as raised:  # An error on purpose keeps its class and its words.
            await engine.load(tmp_path / "nowhere")
        assert str(raised.value) == f"no checkpoint in {tmp_path / 'nowhere'}"
    finally:
        await engine.stop()
    assert [stage for stage, _ in stages] == ["Ray", "the weights"]
    assert 0 < stages[0][1] <= stages[1][1]
    log = (context.run_dir / "engine.log").read_text()
    assert "a library that prints" in log
    assert "Stage: the weights." in log
    assert f"waiting: {of_the_run or 'PASSIVE'}\n" in log, "an engine's variable gives way to the run's own"


async def test_an_update_is_asked_about_meanwhile_and_runs_on_when_its_caller_gives_up(
    start_engine: Any, context: EngineContext
) -> None:
    engine = await start_engine(update="wait")
    updating = await begin_update(engine)
    assert (await engine.stats())["tokens_decoded"] == 5
    assert await engine.versions() == {"default": 4}
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    (context.run_dir / "go-on").touch()
    await engine.save(context.run_dir)
    assert await engine.versions() == {"default": 5}


async def test_any_other_error_comes_with_its_remedy_and_how_to_resume(
    start_engine: Any, context: EngineContext
) -> None:
    engine = await start_engine(update="fail")
    with pytest.raises(EngineError) as raised:
        await update(engine)
    error, line, end = re.split(r"host_child\.py:(\d+): raise RuntimeError\(", str(raised.value))
    assert int(line) > 1
    assert error.startswith("The engine failed in 'update': RuntimeError: RayError: no such luck (")
    resume = f"agl train --resume {context.run_dir} (log: {context.run_dir / 'engine.log'})"
    assert end.endswith(f"). Try again. Resume the run from its last checkpoint: {resume}")
    assert "in update" in (context.run_dir / "engine.log").read_text(), "the traceback"
    assert await engine.versions() == {"default": 4}, "it goes on"


@pytest.mark.parametrize(("start", "kind"), [("ConfigError", ConfigError), ("ValueError", EngineError)])
async def test_an_engine_that_does_not_start_says_why_and_can_be_stopped(
    context: EngineContext, start: str, kind: type[Exception]
) -> None:
    engine = ScriptedEngine(Script(start=start), context)
    with pytest.raises(kind, match=r"did not start: .*no such luck.*\. Try again\. \(log: .*engine\.log\)"):
        await engine.start()
    await engine.stop()
    with pytest.raises(EngineError, match="not running"):
        await update(engine)


async def test_a_process_that_dies_while_it_starts_was_in_a_stage(start_engine: Any) -> None:
    with pytest.raises(EngineError, match=r"lost during 'start' \(the weights, for \d+ s; exit code 9\)"):
        await start_engine(start="die", stages=("Ray", "the weights"))


@pytest.mark.timing
async def test_a_start_that_takes_too_long_names_its_stage_and_shows_the_log(
    start_engine: Any, context: EngineContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedEngine, "seconds_to_start", 2.0)
    with pytest.raises(EngineError, match=r"did not start in 2 s; it was the weights, for \d s\.") as raised:
        await start_engine(start="hang", stages=("Ray", "the weights"), log="out of tokens")
    assert "out of tokens" in str(raised.value).partition(f"The end of {context.run_dir / 'engine.log'}:")[2]


async def test_a_process_that_dies_is_noticed_at_once_with_the_end_of_its_log(
    start_engine: Any, context: EngineContext
) -> None:
    """The end of an earlier restart's log is not in it."""
    context.run_dir.mkdir()
    (context.run_dir / "engine.log").write_text("RayError: no such luck\n")
    engine = await start_engine(update="die", log="out of tokens")
    engine.check()
    with pytest.raises(EngineError, match=r"lost during 'update' \(exit code 9\)\. Resume the run") as raised:
        await update(engine)
    assert "out of tokens" in str(raised.value).partition("The end of")[2]
    assert "luck" not in str(raised.value)
    with pytest.raises(EngineError, match="lost during 'stats'"):
        await engine.stats()
    with pytest.raises(EngineError, match="lost during 'rollouts'"):
        engine.check()
    known = await start_engine(update="die", log="RayError: no such luck" + "\nand what follows it" * 20)
    with pytest.raises(
        EngineError, match=r"exit code 9\)\. Try again\. Resume.*engine\.log:\nRayError: no such luck\n"
    ):
        await update(known)


async def test_a_killed_process_is_explained_by_its_exit_code(start_engine: Any) -> None:
    engine = await start_engine(update="wait")
    updating = await begin_update(engine)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"exit code -9\)\. Add memory\. Resume"):
        await updating


async def test_a_process_that_hangs_is_ended_and_whatever_waits_for_it_hears_of_it(
    start_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedEngine, "seconds_to_answer", 0.8)
    engine = await start_engine(update="wait")
    updating = await begin_update(engine)
    os.kill(engine.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"exit code -9\)\. It did not answer in 0\.8 s, and was ended\. Resume"):
        await updating


async def test_what_an_engine_lost_is_told_with_whatever_is_asked(start_engine: Any) -> None:
    engine = await start_engine(lost=True)
    for request in (engine.stats, lambda: update(engine)):
        with pytest.raises(EngineError, match=r"A node was lost \(10\.0\.0\.7\)\. Resume the run"):
            await request()


async def test_a_process_that_does_not_end_is_killed(context: EngineContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedEngine, "seconds_to_end", 0.2)
    monkeypatch.setenv("STUCK", "1")
    engine = ScriptedEngine(Script(), context)
    await engine.start()
    await engine.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)
