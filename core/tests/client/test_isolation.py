"""Agents in processes of their own: what they report arrives, and whatever they do ends with their attempt."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from stack import make_rollout, until

from agl_core.client import ProcessPerAttempt
from agl_core.errors import AgentError
from agl_core.types import Ending, OutcomeStatus, Task

HERE = Path(__file__).parent
QUICK = pytest.mark.parametrize("workplace", [{"timeout": 2.0, "attempts": 1}], indirect=True)


def processes(place: Any, entry: str = "isolated_agents:solve", folder: Path = HERE, **options: Any) -> Any:
    return ProcessPerAttempt(entry, folder, base_url=place.stack.server.base_url, **options)


async def run(place: Any, tasks: list[Any], runner: Any = None) -> list[Any]:
    """(rollout, attempt) of each task."""
    ended = await place.finish(place.start_runner(runner or processes(place)), tasks)
    return [ended[i] for i in range(len(tasks))]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_each_attempt_has_a_process_a_state_and_randomness_of_its_own(workplace: Any) -> None:
    ended = await run(workplace, [{"does": "tell"}] * 4)
    results = [attempt.result for _, attempt in ended]
    assert {rollout.ending for rollout, _ in ended} == {Ending.FINISHED}
    assert len({each["pid"] for each in results} | {os.getpid()}) == 5
    assert [each["seen"] for each in results] == [1] * 4
    assert len({number for each in results for number in each["random"]}) == 8


async def test_calls_of_a_client_made_at_import_belong_to_their_attempts(workplace: Any) -> None:
    ended = await run(workplace, [{"does": "tell"}] * 3)
    for _, attempt in ended:
        assert len(await workplace.stack.store.calls([attempt.key])) == 1


async def test_the_environment_names_the_attempt(workplace: Any) -> None:
    [(rollout, attempt)] = await run(workplace, [{"does": "tell_environment"}])
    found = attempt.result
    assert found["OPENAI_BASE_URL"] == f"{workplace.stack.url(attempt.key)}"
    assert found["OPENAI_API_KEY"] == workplace.stack.server.keys.of_attempt(attempt.key)
    assert (json.loads(found["AGL_TASK"]), found["AGL_ROLLOUT"]) == ({"does": "tell_environment"}, rollout.id)


async def test_async_agents_can_have_processes_too(workplace: Any) -> None:
    [(rollout, attempt)] = await run(workplace, [{"does": "x"}], processes(workplace, "isolated_agents:solve_async"))
    assert rollout.ending is Ending.FINISHED
    assert attempt.result != os.getpid()


@pytest.mark.parametrize("does", ["report", "report_and_die"])
async def test_reports_arrive_even_if_the_process_dies_after_them(workplace: Any, does: str) -> None:
    [(rollout, attempt)] = await run(workplace, [{"does": does}])
    store = workplace.stack.store
    (outcome,) = await store.outcomes([attempt.key])
    assert (outcome.tool, outcome.tool_call_id, outcome.status) == ("lookup", "call_1", OutcomeStatus.ERROR)
    rewards = {each.name: each.value for each in await store.rewards([attempt.key])}
    died = does == "report_and_die"
    assert rewards == ({"style": 0.5} if died else {"style": 0.5, "result": 0.25})
    assert rollout.ending is (Ending.CRASHED if died else Ending.FINISHED)
    if died:
        assert attempt.error == "the agent's process exited with status 3 before it had a result"


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("fail", "KeyError: 'city' (isolated_agents.py:"),
        ("leave", "SystemExit: I am leaving"),
        ("crash", "was ended by SIGSEGV before it had a result"),
        ("return_nonsense", "the agent returned what is not JSON"),
    ],
)
async def test_a_crash_is_data_and_others_go_on(workplace: Any, does: str, said: str) -> None:
    (bad, attempt), (good, _) = await run(workplace, [{"does": does}, {"does": "tell"}])
    assert (bad.ending, good.ending) == (Ending.CRASHED, Ending.FINISHED)
    assert said in attempt.error


@QUICK
async def test_agents_that_spin_do_not_starve_the_others(workplace: Any) -> None:
    ended = await run(workplace, [{"does": "spin"}] * 2 + [{"does": "tell"}] * 4)
    assert [rollout.ending for rollout, _ in ended] == [Ending.TIMED_OUT] * 2 + [Ending.FINISHED] * 4
    assert workplace.workers[0].worker.abandoned == 0


@QUICK
@pytest.mark.parametrize("then", ["return", "sleep", "ignore SIGTERM"])
async def test_what_an_agent_started_ends_with_it(workplace: Any, tmp_path: Path, then: str) -> None:
    task = {"does": "start_family", "file": str(tmp_path / "pids"), "then": then}
    [(rollout, _)] = await run(workplace, [task])
    assert rollout.ending is (Ending.FINISHED if then == "return" else Ending.TIMED_OUT)
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert [pid for pid in pids if is_alive(pid)] == []


async def test_an_agent_may_not_take_more_memory_than_allowed(workplace: Any) -> None:
    runner = processes(workplace, memory=2**29)
    (big, attempt), (small, _) = await run(
        workplace, [{"does": "allocate", "mib": 1024}, {"does": "allocate", "mib": 8}], runner
    )
    assert (big.ending, small.ending) == (Ending.CRASHED, Ending.FINISHED)
    assert "MemoryError" in attempt.error


async def test_an_agent_that_starts_threads_at_import_is_imported_for_each_attempt(
    workplace: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "threaded_agent.py").write_text(
        "import os, threading, time, httpx\n"
        "threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
        "def solve(task):\n"
        "    body = {'model': 'm', 'messages': [{'role': 'user', 'content': 'hi'}]}\n"
        "    httpx.post(os.environ['OPENAI_BASE_URL'] + '/chat/completions', json=body).raise_for_status()\n"
        "    return threading.active_count()\n"
    )
    with caplog.at_level(logging.WARNING):
        ended = await run(workplace, [1, 2], processes(workplace, "threaded_agent:solve", tmp_path))
    assert [attempt.result for _, attempt in ended] == [2, 2]  # In a fork, the thread would not be there.
    assert "threaded_agent:solve starts threads" in caplog.text


async def test_an_agent_that_cannot_be_imported_is_an_error_at_the_start(workplace: Any) -> None:
    runner = processes(workplace, "no_such_agent:solve")
    with pytest.raises(AgentError, match="no_such_agent"):
        await runner.start()


@pytest.mark.parametrize("workplace", [{"attempts": 2}], indirect=True)
async def test_when_what_starts_processes_is_killed_its_attempts_are_tried_again(
    workplace: Any, tmp_path: Path
) -> None:
    worker = workplace.start_runner(processes(workplace))
    file = tmp_path / "pids"
    task = {"does": "start_family", "file": str(file), "then": "sleep"}
    running = asyncio.create_task(workplace.finish(worker, [task, {"does": "tell"}]))
    await until(lambda: file.exists() and len(file.read_text().splitlines()) == 3)
    forker = next(each for each in psutil.Process().children() if "agl_core.client.forker" in " ".join(each.cmdline()))
    file.unlink()
    task["then"] = "return"
    forker.send_signal(signal.SIGKILL)
    ended = await running
    attempts = await workplace.stack.store.attempts("w0")
    assert [attempt.ending for attempt in attempts] == [Ending.LOST, Ending.FINISHED]
    assert ended[1][0].ending is Ending.FINISHED


async def test_stopping_the_worker_ends_its_processes(workplace: Any, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    worker = workplace.start_runner(processes(workplace))
    task = Task("t", {"does": "start_family", "file": str(file), "then": "sleep"})
    await workplace.stack.server.queue.enqueue([make_rollout("w0", task=task)])
    await until(lambda: file.exists() and len(file.read_text().splitlines()) == 3)
    await worker.stop()
    [rollout] = await workplace.stack.server.queue.done(["w0"])
    assert rollout.ending is Ending.CANCELLED
    assert [pid for pid in map(int, file.read_text().split()) if is_alive(pid)] == []
    assert not [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]


KILLED = """
import asyncio, sys
from pathlib import Path
from agl_core.client import LightningClient, ProcessPerAttempt, Worker

async def main(url, key, folder):
    async with LightningClient(url, key) as client:
        runner = ProcessPerAttempt("isolated_agents:solve", Path(folder), base_url=url)
        await Worker(client, runner, concurrency=4).run()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_worker_that_is_killed_leaves_nothing_behind(workplace: Any, tmp_path: Path) -> None:
    server, file = workplace.stack.server, tmp_path / "pids"
    task = Task("t", {"does": "start_family", "file": str(file), "then": "ignore SIGTERM"})
    await server.queue.enqueue([make_rollout("w0", task=task)])
    command = [sys.executable, "-c", KILLED, server.base_url, server.worker_key, str(HERE)]
    worker = subprocess.Popen(command)  # noqa: ASYNC220
    await until(lambda: file.exists() and len(file.read_text().splitlines()) == 3)
    family = psutil.Process(worker.pid).children(recursive=True)
    worker.kill()
    worker.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=20)
    assert alive == []
    await until(lambda: not [pid for pid in map(int, file.read_text().split()) if is_alive(pid)])
