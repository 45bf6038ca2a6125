"""An engine's process and the run's side of it: real processes and pipes, an engine that answers by a script."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from agl_core.engines.host import ProcessEngine
from agl_core.errors import CheckpointError, ConfigError, EngineError
from agl_core.protocols import EngineContext, PolicySpec
from agl_core.testing.engines import Row, batch_of

CHILD = """
import os, sys, threading, time
from pathlib import Path
import numpy as np
from agl_core import errors
from agl_core.engines.child import Host
from agl_core.protocols import UpdateResult
from test_host_script import Script

class Engine:
    urls, context_length = ("http://127.0.0.1:9/v1",), 77
    version = 4

    def __init__(self, host):
        self.host, self.script = host, host.options
        print("a library that prints", flush=True)
        print("waiting:", os.environ.get("WAITING"), flush=True)
        for stage in self.script.stages:
            host.stage(stage)
        if self.script.start == "die":
            os._exit(9)
        if self.script.start == "hang":
            time.sleep(600)
        if self.script.start:
            raise getattr(errors, self.script.start, ValueError)("no such luck")

    def update(self, request, progress):
        assert request.policy == "default"
        if self.script.update == "die":
            os._exit(9)
        if self.script.update == "fail":
            raise RuntimeError("first line\\nRayError: no such luck")
        if self.script.update == "wait":
            progress(0.25)
            while not (self.host.context.run_dir / "go-on").exists():
                time.sleep(0.01)
        self.version += 1
        progress(1.0)
        values_N = np.array([0.1 + 0.2])
        return UpdateResult(self.version, {"loss": 1 / 3}, values_N, values_N, (None,))

    def save(self, folder):
        (Path(folder) / "saved").write_text(str(folder))

    def load(self, folder):
        raise errors.CheckpointError(f"no checkpoint in {folder}")

    def versions(self):
        return {"default": self.version}

    def stats(self):
        if self.script.lost:
            self.host.lost("A node was lost (10.0.0.7)")
        return {"tokens_decoded": 5.0, "seed": self.host.context.seed}

host = Host.connect(Script, at_end=(lambda: time.sleep(60)) if os.environ.get("STUCK") else None)
if host.options.log:
    print(host.options.log, file=sys.stderr, flush=True)
with host.starting():
    engine = Engine(host)
host.serve(engine)
"""
SCRIPT = """
from pydantic import BaseModel

class Script(BaseModel):
    start: str = ""
    update: str = ""
    lost: bool = False
    log: str = ""
    stages: tuple[str, ...] = ()
"""
BATCH = batch_of([Row(prompt=[1, 2], response=[3], logprobs=[-0.25], value=1.0)])


class Script(BaseModel):
    start: str = ""
    update: str = ""
    lost: bool = False
    log: str = ""
    stages: tuple[str, ...] = ()


class ScriptedEngine(ProcessEngine):
    module = "test_host_child"

    def remedy(self, lines: Sequence[str], exit_code: int | None) -> str | None:
        if any("no such luck" in line for line in lines):
            return "Try again."
        return "Add memory." if exit_code == -9 else None


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineContext:
    (tmp_path / "test_host_child.py").write_text(CHILD)
    (tmp_path / "test_host_script.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return EngineContext(tmp_path / "run", 3, {"default": PolicySpec(str(tmp_path))}, False, (), "secret")


@pytest.fixture
async def engine(context: EngineContext) -> Any:
    """Makes and starts an engine that follows a script."""
    made = []

    async def start(**script: Any) -> ScriptedEngine:
        made.append(ScriptedEngine(Script(**script), context))
        await made[-1].start()
        return made[-1]

    yield start
    for each in made:
        await each.stop()


async def update(engine: ScriptedEngine, progress: Any = None) -> Any:
    return await engine.update("default", BATCH, "grpo", {}, progress)


async def test_a_start_says_where_it_serves(context: EngineContext) -> None:
    made = ScriptedEngine(Script(), context)
    try:
        upstream = await made.start()
        assert (upstream.urls, upstream.models) == (("http://127.0.0.1:9/v1",), {"default": "default"})
        assert (upstream.api_key, upstream.context_length) == ("secret", 77)
    finally:
        await made.stop()
    assert "a library that prints" in (context.run_dir / "engine.log").read_text()


@pytest.mark.parametrize("of_the_run", [None, "ACTIVE"])
async def test_a_variable_of_the_engine_gives_way_to_the_runs_own(
    engine: Any, context: EngineContext, monkeypatch: pytest.MonkeyPatch, of_the_run: str | None
) -> None:
    monkeypatch.delenv("WAITING", raising=False)
    if of_the_run is not None:
        monkeypatch.setenv("WAITING", of_the_run)
    monkeypatch.setattr(ScriptedEngine, "environment", {"WAITING": "PASSIVE"})
    made = await engine()
    await made.stop()
    assert f"waiting: {of_the_run or 'PASSIVE'}\n" in (context.run_dir / "engine.log").read_text()


async def test_everything_crosses_exactly(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, shares = await engine(), []
    result = await update(made, shares.append)
    assert (result.version, result.metrics, result.dropped) == (5, {"loss": 1 / 3}, (None,))
    assert result.advantage_N.dtype == np.float64
    assert result.advantage_N.tolist() == [0.1 + 0.2]
    assert shares == [1.0]
    assert await made.versions() == {"default": 5}
    assert await made.stats() == {"tokens_decoded": 5.0, "seed": 3}
    monkeypatch.chdir(tmp_path)
    await made.save(Path("."))
    assert (tmp_path / "saved").read_text() == str(tmp_path)


async def test_statistics_are_answered_and_progress_is_reported_during_an_update(
    engine: Any, context: EngineContext
) -> None:
    made, begun = await engine(update="wait"), asyncio.Event()
    updating = asyncio.create_task(update(made, lambda _: begun.set()))
    await begun.wait()
    assert (await made.stats())["tokens_decoded"] == 5
    assert await made.versions() == {"default": 4}
    (context.run_dir / "go-on").touch()
    assert (await updating).version == 5


async def test_an_update_runs_on_when_its_caller_gives_up(engine: Any, context: EngineContext) -> None:
    made, begun = await engine(update="wait"), asyncio.Event()
    updating = asyncio.create_task(update(made, lambda _: begun.set()))
    await begun.wait()
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    (context.run_dir / "go-on").touch()
    await made.save(context.run_dir)
    assert await made.versions() == {"default": 5}


async def test_an_error_on_purpose_keeps_its_class_and_its_words(engine: Any, tmp_path: Path) -> None:
    made = await engine()
    with pytest.raises(CheckpointError) as raised:
        await made.load(tmp_path / "nowhere")
    assert str(raised.value) == f"no checkpoint in {tmp_path / 'nowhere'}"


async def test_any_other_error_comes_with_its_remedy_and_how_to_resume(engine: Any, context: EngineContext) -> None:
    made = await engine(update="fail")
    with pytest.raises(EngineError) as raised:
        await update(made)
    assert str(raised.value) == (
        f"The engine failed in 'update': RuntimeError: RayError: no such luck. Try again. Resume the run from its last "
        f"checkpoint: agl train --resume {context.run_dir} (log: {context.run_dir / 'engine.log'})"
    )
    assert "in update" in (context.run_dir / "engine.log").read_text(), "the traceback"
    assert await made.versions() == {"default": 4}, "it goes on"


@pytest.mark.parametrize(("start", "kind"), [("ConfigError", ConfigError), ("ValueError", EngineError)])
async def test_an_engine_that_does_not_start_says_why(engine: Any, start: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"did not start: .*no such luck\. Try again\. \(log: .*engine\.log\)"):
        await engine(start=start)


async def test_a_start_says_its_stages_and_after_how_many_seconds(context: EngineContext) -> None:
    said: list[tuple[str, float]] = []
    made = ScriptedEngine(Script(stages=("Ray", "the weights")), context)
    made.report_stages(lambda stage, seconds: said.append((stage, seconds)))
    try:
        await made.start()
    finally:
        await made.stop()
    assert [stage for stage, _ in said] == ["Ray", "the weights"]
    assert 0 < said[0][1] <= said[1][1]
    assert "Start: the weights." in (context.run_dir / "engine.log").read_text()


async def test_a_process_that_dies_while_it_starts_was_in_a_stage(engine: Any) -> None:
    with pytest.raises(EngineError, match=r"lost during 'start' \(the weights, for \d+ s; exit code 9\)"):
        await engine(start="die", stages=("Ray", "the weights"))


@pytest.mark.timing
async def test_a_start_that_takes_too_long_names_its_stage_and_shows_the_log(
    engine: Any, context: EngineContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedEngine, "seconds_to_start", 4.0)
    with pytest.raises(EngineError, match=r"did not start in 4 s; it was the weights, for \d s\. If it") as raised:
        await engine(start="hang", stages=("Ray", "the weights"), log="out of tokens")
    assert "raise its start_timeout" in str(raised.value)
    assert "out of tokens" in str(raised.value).partition(f"The end of {context.run_dir / 'engine.log'}:")[2]


async def test_a_start_that_failed_can_be_stopped_and_nothing_comes_after(context: EngineContext) -> None:
    made = ScriptedEngine(Script(start="ValueError"), context)
    with pytest.raises(EngineError):
        await made.start()
    await made.stop()
    with pytest.raises(EngineError, match="not running"):
        await update(made)


async def test_a_process_that_dies_is_noticed_at_once_with_the_end_of_its_log(engine: Any) -> None:
    made = await engine(update="die", log="out of tokens")
    with pytest.raises(EngineError, match=r"lost during 'update' \(exit code 9\)\. Resume the run") as raised:
        await update(made)
    assert "out of tokens" in str(raised.value).partition("The end of")[2]
    with pytest.raises(EngineError, match="lost during 'stats'"):
        await made.stats()


async def test_a_killed_process_is_explained_by_its_exit_code_and_the_log_by_the_last_lines(engine: Any) -> None:
    made = await engine(update="wait")
    begun = asyncio.Event()
    updating = asyncio.create_task(update(made, lambda _: begun.set()))
    await begun.wait()
    os.kill(made.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"exit code -9\)\. Add memory\. Resume"):
        await updating
    known = await engine(update="die", log="RayError: no such luck\nand what follows it")
    with pytest.raises(EngineError, match=r"exit code 9\)\. Try again\. Resume"):
        await update(known)


async def test_what_an_earlier_restart_died_of_is_not_told_of_this_one(engine: Any, context: EngineContext) -> None:
    context.run_dir.mkdir()
    (context.run_dir / "engine.log").write_text("RayError: no such luck\n")
    made = await engine(update="die", log="nothing to see")
    with pytest.raises(EngineError, match="nothing to see") as raised:
        await update(made)
    assert "luck" not in str(raised.value)
    assert "Try again" not in str(raised.value)


async def test_what_an_engine_lost_is_told_with_whatever_is_asked(engine: Any) -> None:
    made = await engine(lost=True)
    for asked in (made.stats, lambda: update(made)):
        with pytest.raises(EngineError, match=r"A node was lost \(10\.0\.0\.7\)\. Resume the run"):
            await asked()


async def test_a_model_that_is_out_of_reach_is_found_out_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    policies = {"default": PolicySpec("nobody/no-such-model")}
    made = ScriptedEngine(Script(), EngineContext(tmp_path / "run", 3, policies, False, (), "secret"))
    with pytest.raises(EngineError, match=r"no folder 'nobody/no-such-model'.*does not answer"):
        await made.start()
    assert not (tmp_path / "run").exists()


async def test_a_process_that_does_not_end_is_killed(context: EngineContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedEngine, "seconds_to_end", 0.2)
    monkeypatch.setenv("STUCK", "1")
    made = ScriptedEngine(Script(), context)
    await made.start()
    assert made.pid is not None
    await made.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(made.pid, 0)


def test_a_process_ends_with_its_run(context: EngineContext, tmp_path: Path) -> None:
    code = f"""
import asyncio, os, signal
from pathlib import Path
from test_host_script import Script
from agl_core.engines.host import ProcessEngine
from agl_core.protocols import EngineContext, PolicySpec

class Engine(ProcessEngine):
    module = "test_host_child"
    def remedy(self, lines, exit_code):
        return None

async def main():
    folder = Path({json.dumps(str(tmp_path))})
    engine = Engine(Script(), EngineContext(folder / "run", 0, {{"default": PolicySpec(str(folder))}}, False, (), "k"))
    await engine.start()
    print(engine.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False, timeout=120)
    assert parent.returncode == -signal.SIGKILL
    child = Path(f"/proc/{int(parent.stdout)}/stat")
    for _ in range(600):
        if not child.exists() or child.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        subprocess.run(["sleep", "0.1"], check=True)
    pytest.fail("the engine's process outlived its run")
