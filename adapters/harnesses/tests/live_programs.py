"""Command-line agents as they are published, against a scripted model server: `make test-harnesses`.

The server's own log is the truth: each call is recorded with its ids, each next prompt continues the ids of the reply
before, and each tool's result stands at the call that asked for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agl_core.client.local import WorkerThread
from agl_core.client.processes import CommandPerAttempt
from agl_core.config.models import RunConfig, UntrainedConfig
from agl_core.protocols import Upstream
from agl_core.testing import episodes as make
from agl_core.testing.scripts import Received
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Attempt, Ending, LineageKind, Task, Tokens
from agl_harnesses import grading
from agl_harnesses.harness import ProgramHarness, ProgramOptions
from agl_harnesses.programs import PROGRAMS
from agl_server.testing import Stack, running_stack, until
from agl_server.training.lineages import places_of

from .make_page import COUNTED
from .matrix import FINAL, SCENARIOS, SUMMARY, TITLE, TOOLS, Play, Repair, Stuck

ENVIRONMENTS = Path(__file__).parents[3] / ".venv-harnesses"
RELEASES = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
FULL = 190_000
"""Tokens of a history that leaves no room in the context of any of these programs."""


class Server(ScriptedUpstream):
    """Answers each attempt by its play, and renders a reply that is echoed as it was sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.plays: dict[str, Any] = {}
        self.log: dict[str, list[tuple[list[int], list[int]]]] = {}
        """The ids of prompt and reply of each call, by rollout."""
        self._sampled: dict[tuple[str, str], list[int]] = {}
        self.answer = lambda received: self.plays[rollout_of(received)].answer(received)

    def encode(self, received: Received, completion: dict[str, Any], streamed: bool) -> str:
        rollout, [choice] = rollout_of(received), completion["choices"]
        prompt_ids: list[int] = []
        for item in received.items:
            text = shown(item)
            echoed = self._sampled.get((rollout, text)) if item["role"] == "assistant" else None
            prompt_ids += echoed or text.encode()
        self._sampled[rollout, shown(choice["message"])] = choice["token_ids"]
        completion["prompt_token_ids"] = prompt_ids
        self.log.setdefault(rollout, []).append((prompt_ids, choice["token_ids"]))
        if f"{self.plays[rollout].name} is full" in shown(choice["message"]):
            completion["usage"] = {"prompt_tokens": FULL, "completion_tokens": 9, "total_tokens": FULL + 9}
        return super().encode(received, completion, streamed)


def rollout_of(received: Received) -> str:
    return received.headers["x-agl-rollout"].partition("/")[0]


def shown(message: Any) -> str:
    """A message as text. An echo may write its arguments with other spaces, as model servers allow."""
    calls = message.get("tool_calls") or ()
    asked = [(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    return json.dumps([message["role"], message.get("content") or "", message.get("tool_call_id"), asked])


@pytest.fixture(params=[name for name in TOOLS if os.environ.get("HARNESS", name) == name])
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A program's name; it is installed, and on the PATH."""
    folder = installed(request.param)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    if request.param == "codex":  # With this model's own entry, its sub-agents were behind a tool of OpenAI's servers.
        home = {**os.environ, "CODEX_HOME": str(tmp_path)}
        listed = subprocess.run(["codex", "debug", "models", "--bundled"], check=True, capture_output=True, env=home)
        [model] = [m for m in json.loads(listed.stdout)["models"] if m["slug"] == TOOLS["codex"].model]
        Path("models.json").write_text(json.dumps({"models": [{**model, "supports_search_tool": False}]}))
    return str(request.param)


def installed(name: str) -> Path:
    """The folder with the program's command, which pip or npm installs if it is not there."""
    release, folder = RELEASES[name], ENVIRONMENTS / name
    version = "newest" if os.environ.get("NEWEST") else release["version"]
    mark = folder / "version"
    binaries = folder / ("bin" if "pip" in release else "node_modules/.bin")
    if not mark.exists() or mark.read_text() != version or version == "newest":
        folder.mkdir(parents=True, exist_ok=True)
        if "pip" in release:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            wanted = release["pip"] if version == "newest" else f"{release['pip']}=={version}"
            subprocess.run([binaries / "pip", "install", "-q", "--upgrade", wanted], check=True)
        else:
            npm = shutil.which("npm") or pytest.fail("These tests need Node and npm on the PATH.")
            tag = "latest" if version == "newest" else version
            package = f"{release['npm']}@{tag}"
            subprocess.run([npm, "install", "--no-audit", "--no-fund", "--prefix", folder, package], check=True)
            script = folder / "node_modules" / release["npm"] / "install.cjs"
            if script.exists():  # npm may have been told to run no such scripts.
                subprocess.run(["node", script], check=True)
        mark.write_text(version)
    return binaries


@contextlib.asynccontextmanager
async def running(
    program: str,
    plays: dict[str, Any],
    timeout: float,
    config: RunConfig | None = None,
    metadata: Any = None,
    **settings: Any,
) -> AsyncIterator[tuple[Stack, Server]]:
    """A worker runs the program on each play's prompt."""
    options = ProgramOptions(model=TOOLS[program].model, **settings)
    [known] = [known for known in PROGRAMS if known.name == program]
    async with Server() as server:
        server.plays = plays
        upstream = Upstream((server.url,), {"default": "served"}, "upstream-key", streams=True)
        async with running_stack(upstream=upstream, timeout=timeout, attempts=1) as stack:
            runner = CommandPerAttempt(ProgramHarness(known, options, config))
            worker = WorkerThread(
                runner, base_url=stack.server.base_url, worker_key=stack.server.worker_key, concurrency=len(plays)
            )
            worker.begin()
            try:
                await stack.server.queue.enqueue(
                    [
                        make.rollout(rollout, task=Task(rollout, play.prompt, metadata=metadata or {}))
                        for rollout, play in plays.items()
                    ]
                )
                yield stack, server
            finally:
                await worker.stop()


@pytest.mark.timeout(900)
async def test_all_calls_ids_and_tool_results_are_recorded(program: str) -> None:
    tools = TOOLS[program]
    plays = {
        rollout: Play(tools, f"{rollout}{os.getpid()}", [*SCENARIOS.keys() - tools.gaps]) for rollout in ("a", "b")
    }
    settings = {"arguments": tools.arguments, "variables": tools.variables}
    if program == "codex":
        settings["arguments"] += ("-c", f"model_catalog_json={Path('models.json').absolute()}")
    async with running(program, plays, 600, **settings) as (stack, server):
        for rollout in plays:
            await stack.server.queue.done([rollout])
        for rollout, play in plays.items():
            attempt = await check(stack, server, rollout, play)
            assert str(attempt.result).strip().endswith(FINAL)
            assert Path(play.edited).read_text().strip() == play.edit
            assert play.seen == {"sub-agent", "compaction"} - tools.gaps.keys()
            assert not_continued(server.log[rollout], play.breaks) == []
        await count(program, "scenarios", stack, plays)


async def check(stack: Stack, server: Server, rollout: str, play: Play) -> Attempt:
    """Each call is recorded with its ids and its place, and each tool's result and status at the call that asked."""
    [attempt] = await stack.store.attempts(rollout)
    assert (attempt.ending, attempt.error) == (Ending.FINISHED, None)
    calls, episode = await stack.calls(attempt.key), await stack.episode(attempt.key)
    recorded = [(listed(call.prompt_ids), listed(call.choices[0].response_ids)) for call in calls]
    assert sorted(recorded) == sorted(server.log[rollout])
    results = {
        result.tool_call_id: (result.status.value, str(result.result or result.error))
        for transition in episode.transitions
        for result in transition.tool_results
        if result.tool_call_id in str(transition.response)
    }
    for call, place in zip(calls, places_of(calls, attempt.result), strict=True):
        said, kind = shown(call.choices[0].message), place.lineage.kind
        assert (place.housekeeping is not None) == (TITLE in said), (said, place, call.request)
        if TITLE not in said and SUMMARY not in said:
            assert kind == kind_of(said, "compaction" in play.seen), said
    expected = play.expected
    if play.tools.loses_result:
        expected = {id: result for id, result in expected.items() if f"{play.name} is full" not in result}
    assert episode.unjoined == ()
    assert {id: status for id, (status, _) in results.items()} == {id: status for id, (status, _) in expected.items()}
    assert {id: results[id][1] for id, (_, text) in expected.items() if text not in results[id][1]} == {}
    return attempt


async def count(program: str, test: str, stack: Stack, plays: Iterable[str]) -> None:
    """Count housekeeping for the page, which has the pinned releases: the script's labels, and those that calls got."""
    counts = Counter[str]()
    for rollout in plays:
        [attempt] = await stack.store.attempts(rollout)
        calls = await stack.calls(attempt.key)
        for call, place in zip(calls, places_of(calls, attempt.result), strict=True):
            is_own, is_told = TITLE in shown(call.choices[0].message), place.housekeeping is not None
            counts += {"calls": 1, "own": is_own, "told": is_told, "right": is_own and is_told}
    if "NEWEST" not in os.environ:
        counted = json.loads(COUNTED.read_text())
        counted[program] = {**counted.get(program, {}), test: counts}
        COUNTED.write_text(json.dumps(counted, indent=1, sort_keys=True) + "\n")


@pytest.fixture
def repository(program: str, tmp_path: Path) -> str:
    """A program in a git repository, where aider asks for a message of each commit."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    return program


@pytest.mark.timeout(900)
async def test_calls_for_itself_are_told_from_work(repository: str) -> None:
    program, tools = repository, TOOLS[repository]
    if "housekeeping" in tools.gaps:
        pytest.skip(tools.gaps["housekeeping"])
    play = Play(tools, f"own{os.getpid()}", tools.own_scenarios, is_own=True)
    settings = {
        "arguments": (*tools.arguments, *tools.own_arguments),
        "variables": {**tools.variables, **tools.own_variables},
    }
    async with running(program, {"own": play}, 300, **settings) as (stack, server):
        await stack.server.queue.done(["own"])
        await check(stack, server, "own", play)
        assert any(TITLE.encode() in bytes(ids[:-1]) for _, ids in server.log["own"])
        await count(program, "housekeeping", stack, ["own"])


CHECK = """
try:
    from calc import add
    assert add(2, 2) == 4
except Exception:
    raise SystemExit("1 failed")
print("1 passed")
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="the package bubblewrap is missing")
@pytest.mark.timeout(900)
async def test_a_program_in_a_sandbox_earns_the_reward_of_hidden_tests(program: str, tmp_path: Path) -> None:
    tools = TOOLS[program]
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "check.py").write_text(CHECK)
    tables: Any = {"workspace": {"folder": "shop", "runner": "bubblewrap"}}
    config = UntrainedConfig.model_validate({"config_version": 1, "folder": tmp_path, **tables})
    hidden = "from calc import add\n\ndef test_add():\n    assert add(3, 4) == 7\n"
    metadata = {"tests": {"files": {"test_hidden.py": hidden}, "fail_to_pass": ["test_hidden.py::test_add"]}}
    play = Repair(tools, f"repair{os.getpid()}", ())
    settings = {"arguments": tools.sandbox_arguments, "variables": tools.variables}
    async with running(program, {"sandboxed": play}, 300, config, metadata=metadata, **settings) as (stack, server):
        [rollout] = await stack.server.queue.done(["sandboxed"])
        attempt = await check(stack, server, "sandboxed", play)
        await count(program, "sandbox", stack, ["sandboxed"])
    rule: Any = grading.tests_pass(grading.TestsPassOptions(timeout=250.0), config)
    [reward] = await rule(make.episode(result=attempt.result, task=rollout.task))
    assert reward.value == 1.0, reward.evidence


def kind_of(said: str, is_compacted: bool) -> LineageKind:
    """The conversation of a reply."""
    if "_below_" in said or ("The sub-agent of" in said and "Next, " not in said):
        return LineageKind.SUB_AGENT
    return LineageKind.COMPACTION if FINAL in said and is_compacted else LineageKind.MAIN


def listed(tokens: Tokens | None) -> list[int]:
    return [] if tokens is None else tokens.tolist()


def not_continued(served: Sequence[tuple[list[int], list[int]]], breaks: int) -> list[str]:
    """Replies with tool calls whose ids no later prompt begins with, beyond those that lost their history."""
    lost = []
    for prompt, reply in served:
        whole = [*prompt, *reply]
        asks = bytes(reply[:-1]).startswith(b"Next, ")
        if asks and not any(other[: len(whole)] == whole for other, _ in served):
            lost.append(bytes(reply[:-1]).decode())
    return lost[breaks:]


@pytest.mark.timeout(900)
async def test_a_program_that_is_killed_or_hangs_ends_as_that(program: str) -> None:
    tools = TOOLS[program]
    killed, hangs = f"killed{os.getpid()}", f"hangs{os.getpid()}"
    plays = {rollout: Stuck(tools, rollout) for rollout in (killed, hangs)}
    async with running(program, plays, 90, variables=tools.variables) as (stack, _):
        await until(lambda: plays[killed].hold.arrived.is_set())
        for process in processes_of(killed):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for rollout in plays:
            await stack.server.queue.done([rollout])
        ended = {rollout: (await stack.store.attempts(rollout))[0] for rollout in plays}
        assert {rollout: attempt.ending for rollout, attempt in ended.items()} == {
            killed: Ending.CRASHED,
            hangs: Ending.TIMED_OUT,
        }
        assert "was ended by SIGKILL" in str(ended[killed].error)
        await until(lambda: processes_of(hangs) == [])


def processes_of(rollout: str) -> list[int]:
    """The processes with this rollout's environment."""
    named = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"AGL_ROLLOUT={rollout}".encode() in (process / "environ").read_bytes().split(b"\0"):
                named.append(int(process.name))
    return named
