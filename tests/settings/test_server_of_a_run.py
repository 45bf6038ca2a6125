"""The address and keys of a run's server; settings that the check lets through together do train."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import agl_server
from agl_core.capture.requests import HEADER_ROLLOUT
from agl_core.cli import app
from agl_core.errors import CapabilityError, ServerError
from agl_core.testing import episodes as make
from agl_core.types import AlarmName, Task
from agl_core.wire import OPERATOR_KEY, SERVER_FILE, WORKER_KEY
from agl_server.health.alarms import alarms_of, settings_of
from agl_server.training.metrics import Observer
from agl_server.training.run import local_server, new_run_dir, train

from ..support.scripted_run import Lines
from .conftest import Bench

OF_OTHERS = {"seen.json", "weights.json", "store.sqlite.lock"}
"""The files that the engine writes, and an empty one."""


@pytest.fixture
def run_dir(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(WORKER_KEY, raising=False)
    monkeypatch.delenv(OPERATOR_KEY, raising=False)
    return new_run_dir(bench.load())


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_what_a_run_writes_is_for_its_owner_alone(bench: Bench) -> None:
    before = os.umask(0)
    try:
        async with bench.serving({"seed": 4, "train.checkpoint_every": 1, "workers.processes": 0}) as (
            server,
            _,
            folder,
        ):
            serving = modes(folder)
            keys = [server.worker_key.encode(), server.keys.secret.encode()]
            telling = {file.name for file in files(folder) if any(key in file.read_bytes() for key in keys)}
        ran = await bench.run({"seed": 5})
        ran.summary.write()
        after = modes(ran.folder)
        mine = bench.folder / "mine"
        mine.touch()
    finally:
        os.umask(before)
    assert {"store.sqlite", "store.sqlite-wal", SERVER_FILE, "config.toml"} <= serving.keys()
    assert {"metrics.jsonl", "summary.json", "state.json"} <= after.keys()
    assert telling == {SERVER_FILE}
    written = {**serving, **after}
    assert {name: mode for name, mode in written.items() if mode != 0o600 and name not in OF_OTHERS} == {}
    assert {stat.S_IMODE(f.stat().st_mode) for f in (folder, ran.folder)} == {0o700}
    assert stat.S_IMODE(mine.stat().st_mode) == 0o666, "the umask is that of the agents too"


def modes(folder: Path) -> dict[str, int]:
    return {f.name: stat.S_IMODE(f.stat().st_mode) for f in files(folder)}


async def test_it_does_not_listen_elsewhere_without_a_key_and_says_so_before_anything_starts(
    bench: Bench, run_dir: Path
) -> None:
    loaded = bench.load({"server.host": "0.0.0.0"})
    with pytest.raises(ServerError, match=r"0\.0\.0\.0.*AGL_WORKER_KEY"):
        await train(loaded, run_dir, Observer())
    assert not (run_dir / SERVER_FILE).exists()
    assert not (run_dir / "seen.json").exists(), "the engine was started"


async def test_with_a_key_it_does(bench: Bench, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER_KEY, "chosen-by-me")
    monkeypatch.setenv(OPERATOR_KEY, "chosen-too")
    async with bench.serving({"server.host": "0.0.0.0", "workers.processes": 0}) as (server, _, run_dir):
        assert (server.worker_key, server.keys.operator) == ("chosen-by-me", "chosen-too")
        assert server.base_url.startswith("http://127.0.0.1:")
        async with httpx.AsyncClient(trust_env=False) as client:
            for key, status in (("chosen-by-me", 200), ("chosen-by-mf", 401)):
                sent = await client.get(f"{server.base_url}/agl/v1/health", headers={"Authorization": f"Bearer {key}"})
                assert sent.status_code == status
        assert not {WORKER_KEY, OPERATOR_KEY} & os.environ.keys(), "what agents start inherits the environment"
        server_file = json.loads((run_dir / SERVER_FILE).read_text())
    assert server_file["worker_key"] is None
    assert server_file["base_url"] == server.base_url
    assert "chosen-by-me" not in json.dumps(server_file)


async def test_what_clients_find_as_their_key_is_good_for_no_attempt(bench: Bench, run_dir: Path) -> None:
    """In the trainer's process, whose environment agents share: a request gets its attempt's key by its stamp."""
    async with bench.serving() as (server, session, _):
        task = Task("t", {"answer": 1, "wait": 60})
        rollout = make.rollout("s1-g0-m1", run=session.run, task=task, step=1, member=1)
        await server.queue.enqueue([rollout])
        while not any(attempt.answered for attempt in server.activity().attempts):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        root, key = os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), os.environ["OPENAI_API_KEY"]
        forged = {"model": "default", "messages": [{"role": "user", "content": "forged"}]}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, trust_env=False) as client:
            for path in ("", "/rollout/s1-g0-m1/attempt/0"):
                for headers in ({}, {HEADER_ROLLOUT: "s1-g0-m1/0"}):
                    sent = await client.post(f"{root}{path}/v1/chat/completions", json=forged, headers=headers)
                    assert sent.status_code == 401, (path, headers)
        await server.queue.cancel(["s1-g0-m1"])


async def test_a_server_listens_where_the_one_before_did(bench: Bench, run_dir: Path) -> None:
    loaded = bench.load()
    async with local_server(loaded, run_dir) as first:
        keys, url = first.keys, first.base_url
    async with local_server(loaded, run_dir) as second:
        assert (second.keys, second.base_url) == (keys, url)
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        async with local_server(loaded, run_dir) as third:
            assert third.base_url != url, "another program has the port"
            assert json.loads((run_dir / SERVER_FILE).read_text())["base_url"] == third.base_url


@pytest.mark.parametrize("algorithm", ["reinforce++", "ppo"])
async def test_groups_of_one_where_nothing_compares_them(algorithm: str, bench: Bench) -> None:
    given = {"algorithm.name": algorithm, "train.group_size": 1}
    bench.load(given)
    transitions = (await bench.run(given)).summary.as_json()["transitions"]
    assert transitions["kept"] > 0
    assert transitions["dropped"] == {}


async def test_every_policy_trains_by_its_own_algorithm_and_credit(bench: Bench) -> None:
    model = {"path": str(bench.weights)}
    run = await bench.run(
        {
            "tasks.train.path": "by_turns.jsonl",
            "train.groups_per_step": 1,
            "policies": {
                "author": {
                    "model": model,
                    "agents": ["writer"],
                    "algorithm": {"name": "ppo", "ppo": {"across_calls": True, "gamma": 0.5}},
                    "credit": {"name": "immediate"},
                },
                "judge": {
                    "model": model,
                    "agents": ["crit*"],
                    "credit": {"name": "discounted", "discounted": {"gamma": 0.5}},
                },
            },
        }
    )
    assert [update["policy"] for update in run.updates] == ["author", "judge"] * 2
    author, judge = (run.seen["policies"][name] for name in ("author", "judge"))
    options = author["algorithm_options"]
    assert (author["algorithm"], options["across_calls"], options["gamma"]) == ("ppo", True, 0.5)
    assert (judge["algorithm"], "across_calls" in judge["algorithm_options"]) == ("grpo", False)
    author, judge = run.updates[2:]
    assert (author["kind"], judge["kind"]) == ("reward", "return")
    assert (author["turn"], judge["turn"]) == ([0, 2] * 2, [1, 3] * 2)
    assert (author["values"], judge["values"]) == ([0.0] * 4, [0.25, 1.0] * 2)
    # The terminal reward of 1 comes with the critic's last call, which is part of what the writer sees happen.
    assert [[reward for _, _, reward, _ in calls] for calls in author["calls"]] == [[0.0, 0.0, 0.0, 1.0]] * 2
    assert author["version"] == judge["version"] == [1] * 4

    trained = [line for line in run.metrics if line["kind"] == "train"]
    assert all({"update/author/loss", "update/judge/loss"} <= line.keys() for line in trained)
    assert not any("update/loss" in line for line in trained)


async def test_a_policy_without_trained_agents_is_never_updated(bench: Bench) -> None:
    model = {"path": str(bench.weights)}
    run = await bench.run(
        {
            "tasks.train.path": "by_turns.jsonl",
            "train.agents": ["writer"],
            "policies": {
                "author": {"model": model, "agents": ["writer"]},
                "judge": {"model": model, "agents": ["critic"]},
            },
        }
    )
    assert [update["policy"] for update in run.updates] == ["author"] * 2
    # The return of an episode is 1, by any agent that made its last call.
    assert {value for update in run.updates for value in update["values"]} == {1.0}
    transitions = run.summary.as_json()["transitions"]
    assert transitions["dropped"] == {"untrained_agent": transitions["kept"]}


def test_a_script_trains_and_reads_its_runs(bench: Bench) -> None:
    bench.load({"eval.every": 0})
    mapping = {**bench.written(), "name": "mapped", "folder": str(bench.folder)}
    first = agl_server.train(bench.folder / "train.toml", **{"train.steps": 1})
    second = asyncio.run(agl_server.train_async(mapping, **{"train.steps": 1, "eval.every": 0}))
    for run in (first, second):
        assert (len(run.metrics()), len(run.rollouts(mode="train"))) == (1, 4)
        assert run.transitions(mode="train")["agent"].unique().tolist() == ["solver"]
    assert second.folder.name == "mapped"


async def test_a_run_without_a_worker_says_who_waits_for_whom(bench: Bench) -> None:
    """In its terminal, in its metrics and to `agl doctor RUN`."""
    given = {"workers.processes": 0, "train.steps": 1, "eval.every": 0, "alarms.stall": 1.0}
    loaded, said = bench.load(given), Lines()
    run_dir = new_run_dir(loaded)
    training = asyncio.create_task(train(loaded, run_dir, said))
    while not (stalls := [line for line in said.lines if "alarm stall" in line]) and not training.done():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert "no worker runs a rollout, and 4 wait in the queue" in stalls[0]
    assert "Start a worker: agl worker RUN" in stalls[0]
    doctor = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", str(run_dir)])
    assert "FAIL  waiting: no worker runs a rollout, and 4 wait in the queue" in doctor.output
    worker = await asyncio.create_subprocess_exec(Path(sys.executable).with_name("agl"), "worker", run_dir)
    await training
    assert await worker.wait() == 0
    [line] = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert line["alarm/stall"] == 1.0
    assert {alarm["name"] for alarm in line["alarms"]} == {"stall"}


TOOLS = {"rewards.exact_match": {}, "rewards.tool_results": {}}


def test_a_tool_result_does_not_count_twice(bench: Bench) -> None:
    bench.load(TOOLS)
    with pytest.raises(CapabilityError, match=r"'air'.* and reward 'tool_results'.*a tool result would count twice"):
        bench.load({**TOOLS, "credit.name": "air"})


@pytest.mark.parametrize(
    ("given", "of_tool_results", "of_rewards"),
    [
        ({}, False, False),
        ({"credit.name": "air"}, True, False),
        (TOOLS, True, False),
        ({**TOOLS, "rewards.tool_results.weight": 0.0}, False, False),
        ({"rewards": {}}, False, True),
        ({"rewards.exact_match.weight": 0.0}, False, True),
    ],
)
def test_what_it_may_rest_on(bench: Bench, given: Mapping[str, Any], of_tool_results: bool, of_rewards: bool) -> None:
    names = {AlarmName.ASSERTED_TOOL_RESULTS: of_tool_results, AlarmName.ASSERTED_REWARDS: of_rewards}
    loaded = bench.load(given)
    raised = [name for name in alarms_of(loaded) if name in names]
    assert raised == [name for name, is_raised in names.items() if is_raised]
    assert settings_of(loaded) == ({} if of_tool_results else {AlarmName.TOOLS_FARMED: False})
    chosen = {**given, "alarms.tools_farmed": 0.2}
    assert settings_of(bench.load(chosen)) == {AlarmName.TOOLS_FARMED: 0.2}, "as the run sets it"
