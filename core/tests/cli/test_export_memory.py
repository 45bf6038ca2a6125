"""The memory that an export takes does not grow with the run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_core.reading.export import Format
from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.types import Ending, Reward, RolloutState, Run, TrainingRecord

FEW, MANY = 4_800, 48_000
"""Transitions, in whole groups."""
BUFFERS = 64 << 20
"""Bytes of what waits to be written, which a small run does not fill; the rows of the large one take more."""
EXPORT = """
import asyncio, pathlib, sys, threading, time
from agl_core.reading.export import Format, Selection, export_run

peak = 0

def watch():
    global peak
    while True:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        peak = max(peak, *(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")))
        time.sleep(0.02)

threading.Thread(target=watch, daemon=True).start()
run, to, out = sys.argv[1:]
found = asyncio.run(export_run(pathlib.Path(run), Format(to), pathlib.Path(out), Selection()))
print(max(found.rows.values()), peak)
"""


async def record(folder: Path, transitions: int) -> None:
    """Fill a run with groups of eight rollouts, each of two calls."""
    ids, logprobs = np.arange(64, dtype=np.int32), np.full(32, -0.5, np.float32)
    async with SqliteStore(folder / "store.sqlite") as store:
        waiting: list[Any] = [Run(folder.name, 0, 0.0, {})]
        for number in range(transitions // 2):
            group, member = divmod(number, 8)
            name, step = f"g{group}-m{member}", group // 16 + 1
            done = {"state": RolloutState.DONE, "counted_attempt": 0, "ending": Ending.FINISHED}
            waiting.append(make.rollout(name, run=folder.name, group=f"g{group}", member=member, step=step, **done))
            waiting += [make.attempt(name), Reward(name, 0, "right", float(member % 2), "right")]
            asked = {"role": "user", "content": f"question {group} " + "words " * 20}
            said = {"role": "assistant", "content": f"answer {number} " + "words " * 20}
            for turn in range(2):
                request = {"messages": [asked, said, asked] if turn else [asked]}
                choice = make.choice(message=said, response_ids=ids[:32], logprobs=logprobs)
                call = make.call(turn, choice, rollout=name, request=request, prompt_ids=ids)
                waiting += [call, TrainingRecord(name, 0, call.id, 0, step, 1.0, 0.5, 0.1)]
            if len(waiting) > 5_000:
                await store.put(*waiting)
                waiting = []
        await store.put(*waiting)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    for transitions in (FEW, MANY):
        run = folder / str(transitions)
        run.mkdir()
        (run / "config.toml").write_text("config_version = 1\n[capture]\n")
        asyncio.run(record(run, transitions))
    return [folder / str(transitions) for transitions in (FEW, MANY)]


@pytest.mark.storm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("to", list(Format))
def test_ten_times_the_transitions_take_the_same_memory(runs: list[Path], to: Format, tmp_path: Path) -> None:
    found = []
    for run in runs:
        command = [sys.executable, "-c", EXPORT, run, to.value, tmp_path / run.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append([int(each) for each in done.stdout.split()])

    (rows, small), (many_rows, large) = found
    assert many_rows == rows * MANY // FEW
    assert large < small + BUFFERS
