"""How fast the pages of a run are, and whether they hold up the gateway.

    python tests/benchmarks/view_speed.py

fills a run with 100,000 rollouts through the store's own interface, and measures every page: the first time, and then.
The gateway is measured without and with three open pages, each of which asks whether something changed as often as
browsers do, and is read again each time. Needs a quiet machine; about ten minutes.
`--rollouts N` makes fewer, `--folder RUNS` keeps the run for the next time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
from server_cores import machine
from server_measures import calls, running
from server_records import recorded_call

from agl_core.store.interface import Record
from agl_core.store.sqlite import SqliteStore
from agl_core.types import (
    Attempt,
    Ending,
    Mode,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Task,
    TrainingRecord,
)
from agl_core.view.serving import shown_beside

GROUP, GROUPS_PER_STEP, TURNS = 8, 50, 2
EVAL_EVERY, EVAL_TASKS = 25, 100
CONFIG = """config_version = 1
name = "large"
[agent]
entry = "my_agent:solve"
[tasks.train]
source = "jsonl"
path = "tasks.jsonl"
[policies.default.model]
path = "weights"
[algorithm]
name = "grpo"
[engine]
name = "torch"
[train]
steps = 100000
[rewards.right]
rule = "numeric_match"
"""


async def fill(file: Path, rollouts: int) -> list[dict[str, Any]]:
    """The store of a run of so many training rollouts, with evaluations; the lines of its metrics."""
    chance = random.Random(0)
    lines: list[dict[str, Any]] = []
    steps = rollouts // (GROUP * GROUPS_PER_STEP)
    async with SqliteStore(file) as store:
        await store.put(Run("large", 0, 0.0, {"rewards": {"right": {"weight": 1.0}}}))
        for step in range(steps + 1):
            if step:
                await store.put(*_training(step, chance))
                lines.append(_metrics(step, chance))
            if step % EVAL_EVERY == 0:
                await store.put(*_evaluation(step, chance))
                lines.append({"step": step, "kind": "eval", "restart": 0, "eval/greedy/reward/mean": chance.random()})
    return lines


def _training(step: int, chance: random.Random) -> Iterator[Record]:
    for group in range(GROUPS_PER_STEP):
        name = f"s{step}-g{group}"
        task = Task(name, {"question": f"When does my train leave? Question {name}"}, metadata={"answer": "09:30"})
        for member in range(GROUP):
            rollout = Rollout(f"{name}-m{member}", "large", 0, name, task, Mode.TRAIN, step, member)
            yield from _recorded(rollout, chance)


def _evaluation(step: int, chance: random.Random) -> Iterator[Record]:
    for number in range(EVAL_TASKS):
        name = f"s{step}-eval-greedy-g{number}"
        task = Task(f"e{number}", {"question": f"When does the train {number} leave?"}, split="eval")
        yield from _recorded(Rollout(f"{name}-m0", "large", 0, name, task, Mode.EVAL_GREEDY, step, 0), chance)


def _recorded(rollout: Rollout, chance: random.Random) -> Iterator[Record]:
    done = {"state": RolloutState.DONE, "counted_attempt": 0, "ending": Ending.FINISHED}
    yield Rollout(**{name: getattr(rollout, name) for name in rollout.__dataclass_fields__} | done)
    yield Attempt(rollout.id, 0, "w", float(rollout.step), rollout.step + 0.9, Ending.FINISHED, result="09:30")
    reward = float(chance.random() < rollout.step / 300)
    yield Reward(rollout.id, 0, "right", reward, "right")
    for turn in range(TURNS):
        call = recorded_call(rollout, turn)
        yield call
        if rollout.mode.trains:
            yield TrainingRecord(rollout.id, 0, call.id, 0, rollout.step, reward, reward - 0.5, 0.01, None)


def _metrics(step: int, chance: random.Random) -> dict[str, Any]:
    random_keys = ("reward/mean", "update/loss", "update/kl_behaviour", "update/entropy", "update/grad_norm")
    return {
        "step": step,
        "kind": "train",
        "restart": 0,
        "dropped/no_advantage": float(chance.randrange(100)),
        **{key: chance.random() for key in random_keys},
        "seconds/rollouts": 5.0,
        "seconds/update": 3.0,
        "seconds/step": 8.5,
        "length/prompt": 400.0,
        "length/response": 60.0,
        "tokens/prefilled": 1e6,
        "tokens/reused": 3e6,
        "tokens/decoded": 2e5,
    }


PAGES = {
    "Runs": "/",
    "Run": "/runs/large",
    "All rollouts": "/runs/large/rollouts",
    "Step": "/runs/large/rollouts?step={step}&mode=train",
    "Step, by a text": "/runs/large/rollouts?step={step}&text=g7-m3",
    "Group": "/runs/large/groups/s{step}-g3-m0",
    "Rollout": "/runs/large/rollouts/s{step}-g3-m0",
    "Compare": "/compare?a=large@{first}&b=large@{last}&mode=eval-greedy",
    "Timeline": "/runs/large/timeline?step={step}",
    "Try": "/runs/large/try",
}


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """One that has shown the token of the pages beside the run."""
    async with shown_beside(folder, "127.0.0.1", 0, None) as address:
        url = httpx.URL(address)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{url.port}", follow_redirects=True, timeout=120
        ) as client:
            (await client.get("/static/style.css", params=url.params)).raise_for_status()
            yield client


async def time_pages(folder: Path, steps: int, repeated: int) -> Iterator[str]:
    """Rows of a table: the page, its first time, and the median of later ones, in milliseconds."""
    places = {"step": steps // 2, "first": 0, "last": steps // EVAL_EVERY * EVAL_EVERY}
    rows = []
    async with browser(folder) as client:
        for name, path in PAGES.items():
            taken = []
            for _ in range(1 + repeated):
                started = time.perf_counter()
                answered = await client.get(path.format(**places))
                taken.append(1000 * (time.perf_counter() - started))
                assert answered.status_code == 200, (path, answered.text)
            size = len(answered.content) / 1024
            rows.append(f"| {name} | {taken[0]:.0f} ms | {statistics.median(taken[1:]):.0f} ms | {size:.0f} KiB |")
    return iter(["| page | first | then | size |", "|---|---|---|---|", *rows])


async def time_gateway(folder: Path, seconds: float) -> list[str]:
    """Rows of a table: calls per second and the server's time for each, without and with three open pages."""
    rows = ["| open pages | calls per second | CPU of a call |", "|---|---|---|"]
    async with running(folder) as server:
        await asyncio.to_thread((server.folder / "config.toml").write_text, CONFIG)
        async with browser(server.folder) as client:
            for pages in (0, 3, 0, 3):
                looking = [asyncio.create_task(_look(client, path)) for path in _WATCHED[:pages]]
                found = await calls(server, 16, seconds)
                for each in looking:
                    each.cancel()
                await asyncio.gather(*looking, return_exceptions=True)
                rate = len(found.through.latencies) / seconds
                rows.append(f"| {pages} | {rate:.0f} | {found.cpu_per_call:.2f} ms |")
    return rows


_WATCHED = ("/", "/runs/{run}", "/runs/{run}/rollouts")


async def _look(client: httpx.AsyncClient, path: str) -> None:
    """What an open page does, when something changes all the time."""
    run = re.findall(r'href="/runs/([^"/]+)"', (await client.get("/")).text)[0]
    while True:
        await client.get("/changed")
        (await client.get(path.format(run=run))).raise_for_status()
        await asyncio.sleep(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of the gateway")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = (options.folder or Path(made)) / "large"
        if not folder.exists():
            started = time.perf_counter()
            folder.mkdir(parents=True)
            (folder / "config.toml").write_text(CONFIG)
            lines = asyncio.run(fill(folder / "store.sqlite", options.rollouts))
            (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
            print(f"filled in {time.perf_counter() - started:.0f} s")
        print(f"{options.rollouts} rollouts, on: {machine()}")
        steps = options.rollouts // (GROUP * GROUPS_PER_STEP)
        print("\n".join(asyncio.run(time_pages(folder, steps, options.repeat))))
        print("\n".join(asyncio.run(time_gateway(Path(made), options.seconds))))


if __name__ == "__main__":
    main()
