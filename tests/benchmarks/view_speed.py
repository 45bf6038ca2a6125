"""How fast the pages of a run are, and whether they hold up the gateway.

    python tests/benchmarks/view_speed.py

prints three tables about a run with 100,000 rollouts: every page, the first paint of a run's page in Chromium (if it is
installed), and the gateway without and with three open pages. Takes about five minutes. Other programs on the machine
make times longer, so the fastest of several is taken. `--write` puts the tables into docs/view.md, `--quick` only shows
that it works, `--folder FOLDER` keeps the run for the next time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from server_cores import machine
from server_measures import calls, running
from view_records import CONFIG, EVAL_EVERY, STEP_ROLLOUTS, made_run

from agl_core.testing.browser import CHROMIUM, MISSING, opened
from agl_view.serving import shown_beside

PAGE = Path(__file__).parents[2] / "docs" / "view.md"
BEGIN, END = "<!-- measured by tests/benchmarks/view_speed.py -->", "<!-- end -->"
PAGES = {
    "Runs": "/",
    "Run": "/runs/large",
    "All rollouts (the newest 400)": "/runs/large/rollouts",
    "Step (400 rollouts)": "/runs/large/rollouts?step={step}&mode=train",
    "Step, by an agent and a text": "/runs/large/rollouts?step={step}&agent=solver&text=g7-m3",
    "Group": "/runs/large/groups/s{step}-g3-m0",
    "Rollout": "/runs/large/rollouts/s{step}-g3-m0",
    "Call": "/runs/large/call?rollout=s{step}-g3-m0&attempt=0&call=s{step}-g3-m0-c1",
    "Health": "/runs/large/health",
    "Time": "/runs/large/timeline?step={step}",
    "Overlay": "/overlay?run=large",
    "Compare": "/compare?a=large@{first}&b=large@{last}&mode=eval-greedy",
    "Compare, one task": "/compare/task?a=large@s{first}-eval-greedy-g1-m0&b=large@s{last}-eval-greedy-g1-m0",
    "Try, the form": "/runs/large/try",
    "Try, a step (400 rollouts)": "/runs/large/try?weight.right=0.5&step={step}",
}
WATCHED = ("/", "/runs/{run}", "/runs/{run}/rollouts")
POLL_SECONDS = 2.0
"""As static/view.js."""


@dataclass(frozen=True)
class Pages:
    """The pages beside a run, of which `client` has shown the token."""

    client: httpx.AsyncClient
    address: httpx.URL

    def cpu(self) -> float:
        """Milliseconds of CPU that their process has taken, exactly on Linux."""
        (process,) = [each for each in psutil.Process().children() if "agl_view" in each.cmdline()]
        if sys.platform == "linux":
            return 1000 * time.clock_gettime(~process.pid << 3 | 2)  # Its clock, as clock_getcpuclockid(3) gives it.
        times = process.cpu_times()
        return 1000 * float(times.user + times.system)


@contextlib.asynccontextmanager
async def pages_beside(folder: Path) -> AsyncIterator[Pages]:
    """A process of its own answers, as beside a training."""
    async with shown_beside(folder, "127.0.0.1", 0, None) as shown:
        address = httpx.URL(shown.address)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{address.port}", follow_redirects=True, timeout=120
        ) as client:
            (await client.get("/static/style.css", params=address.params)).raise_for_status()
            yield Pages(client, address)


async def time_pages(folder: Path, rollouts: int, visits: int) -> str:
    """A row for each page."""
    steps = rollouts // STEP_ROLLOUTS
    places = {"step": (steps + 1) // 2, "first": 0, "last": steps // EVAL_EVERY * EVAL_EVERY}
    rows = []
    async with pages_beside(folder) as pages:
        for name, path in PAGES.items():
            taken, cpu = [], []
            for _ in range(1 + visits):
                before, started = pages.cpu(), time.perf_counter()
                answered = await pages.client.get(path.format(**places))
                taken.append(1000 * (time.perf_counter() - started))
                cpu.append(pages.cpu() - before)
                assert answered.status_code == 200, (path, answered.text)
            size = len(answered.content) / 1024
            rows.append(
                f"{name} | {taken[0]:.0f} ms | {min(taken[1:]):.0f} ms "
                f"| {cpu[0]:.0f} ms | {min(cpu[1:]):.0f} ms | {size:.0f} KiB"
            )
    return _table("Page | first visit | later visits | processor time: first | later | size", rows)


async def time_paint(folder: Path, visits: int) -> str:
    """How long a browser waits until it shows something of a run's page: right after the start, and later."""
    if CHROMIUM is None:
        return f"First paint: {MISSING}"
    first, later = [], []
    for _ in range(3):
        async with pages_beside(folder) as pages:
            page = f"http://127.0.0.1:{pages.address.port}/runs/large"
            found = await asyncio.to_thread(_paints, f"{page}?{pages.address.query.decode()}", page, visits)
            first.append(found[0])
            later += found[1:]
    return _table("First paint of the page of a run | fastest | median", [
        f"First visit | {min(first):.0f} ms | {statistics.median(first):.0f} ms",
        f"Later visits | {min(later):.0f} ms | {statistics.median(later):.0f} ms",
    ])  # fmt: skip


def _paints(first: str, then: str, visits: int) -> list[float]:
    paint = "performance.getEntriesByName('first-contentful-paint')[0]"
    found = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, opened(Path(folder)) as page:
        page.look()
        for address in [first, *[then] * visits]:
            page.open(address)
            page.until(paint)
            found.append(float(page.run(f"{paint}.startTime")))
    return found


async def time_gateway(folder: Path, seconds: float, rounds: int) -> str:
    """Short rounds without and with open pages in turn, each pair compared: what slows the machine slows both."""
    rates: dict[int, list[float]] = {0: [], len(WATCHED): []}
    cpu: dict[int, list[float]] = {each: [] for each in rates}
    async with running(folder) as server:
        await asyncio.to_thread((server.folder / "config.toml").write_text, CONFIG)
        async with pages_beside(server.folder) as pages:
            await calls(server, 16, seconds)  # Warms up.
            for opened_pages in list(rates) * rounds:
                looking = [asyncio.create_task(_look(pages.client, path)) for path in WATCHED[:opened_pages]]
                found = await calls(server, 16, seconds)
                for each in looking:
                    each.cancel()
                await asyncio.gather(*looking, return_exceptions=True)
                rates[opened_pages].append(found.through.per_second)
                cpu[opened_pages].append(found.cpu_per_call)
    shares = [100 * with_pages / without for without, with_pages in zip(*rates.values(), strict=True)]
    rows = [
        f"{number} | {statistics.median(rates[number]):,.0f} | {min(rates[number]):,.0f} and {max(rates[number]):,.0f} "
        f"| {statistics.median(cpu[number]):.2f} ms"
        for number in rates
    ]
    table = _table("Open pages | calls/s | slowest and fastest round | server's CPU per call", rows)
    low, middle, high = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
    return (
        f"{table}\n\nWith three open pages the gateway answers {middle:.0f} % of the calls: the median of {rounds} "
        f"pairs of rounds of {seconds:g} s, one right after the other. Half of the pairs lie from {low:.0f} % to "
        f"{high:.0f} %."
    )


async def _look(client: httpx.AsyncClient, path: str) -> None:
    """What an open page does, when something changes all the time."""
    run = re.findall(r'href="/runs/([^"/]+)"', (await client.get("/")).text)[0]
    while True:
        await client.get("/changed")
        (await client.get(path.format(run=run))).raise_for_status()
        await asyncio.sleep(POLL_SECONDS)


def _table(head: str, rows: list[str]) -> str:
    lines = [f"| {row} |" for row in (head, *rows)]
    lines.insert(1, "|" + "---|" * (head.count("|") + 1))
    return "\n".join(lines)


def measure(folder: Path, rollouts: int, scale: float) -> list[str]:
    """The tables, each printed as soon as it is there."""
    visits = max(2, int(20 * scale))
    made = []
    with tempfile.TemporaryDirectory() as other:
        for part in (
            time_pages(folder, rollouts, visits),
            time_paint(folder, visits),
            time_gateway(Path(other), 3 * scale, max(2, int(20 * scale))),
        ):
            made.append(asyncio.run(part))
            print(f"{made[-1]}\n", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.write and options.quick:
        parser.error("--write is for what was measured in full")
    rollouts = 4 * STEP_ROLLOUTS if options.quick else 100_000
    with tempfile.TemporaryDirectory() as made:
        run = made_run((options.folder or Path(made)) / "large", rollouts)
        tables = measure(run, rollouts, 0.1 if options.quick else 1.0)
    if options.write:
        said = "\n\n".join([f"Measured {datetime.date.today():%B %Y} on: {machine()}", *tables])
        text = PAGE.read_text()
        PAGE.write_text(re.sub(f"(?<={BEGIN}\n).*(?=\n{END})", lambda _: said, text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
