"""The pages in a real browser: live updates, keys, small windows, and what axe finds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from axe_core_python.base import AXE_FILE_PATH
from chromium import CHROMIUM, MISSING, Page, opened

from agl_server.store.sqlite import SqliteStore
from agl_view.serving import shown_beside

from .conftest import Folder, rollout

pytestmark = [pytest.mark.storm, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]


class Running:
    """A run that this process writes, and its pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ended, self._ready = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._write(),))

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(60)

    def page(self, path: str) -> str:
        return f"{self._address[0]}{path}{'&' if '?' in path else '?'}{self._address[1]}"

    def step(self, number: int, reward: float) -> None:
        line = {"step": number, "kind": "train", "restart": 0, "reward/mean": reward}
        with (self.folder / "metrics.jsonl").open("ab") as file:
            file.write(orjson.dumps(line) + b"\n")

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    async def _write(self) -> None:
        async with (
            SqliteStore(self.folder / "store.sqlite") as store,
            shown_beside(self.folder, "127.0.0.1", 0, None) as address,
        ):
            await store.put(*rollout("s2-g0-m0", answer="9", reward=1.0, advantage=0.1))
            base, _, query = address.partition("/runs/")
            self._address = base, query.partition("?")[2]
            self._ready.set()
            await asyncio.to_thread(self._ended.wait)


@pytest.fixture
def running(runs: Folder) -> Iterator[Running]:
    running = Running(runs.trained())
    running.start()
    yield running
    running.end()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with opened(tmp_path / "browser") as tab:
        tab.look()
        yield tab
        assert not tab.complaints


def test_runs_and_run_follow_a_run_without_losing_focus_selection_or_scroll(running: Running, page: Page) -> None:
    page.look(height=300)
    page.open(running.page("/runs/calc"))
    page.run("document.querySelector('tbody a').focus()")
    page.run("getSelection().selectAllChildren(document.querySelector('tbody td'))")
    page.run("document.querySelector('tbody').scrollIntoView()")
    page.run("window.seen = document.activeElement")
    scrolled = page.run("scrollY")
    assert scrolled > 100

    running.step(2, 0.75)
    page.until("document.querySelectorAll('tbody tr').length === 2")

    assert page.run("document.activeElement === window.seen && window.seen.isConnected")
    assert page.run("window.seen.textContent") == "1"
    assert page.run("getSelection().toString()") == "1.5"
    assert abs(page.run("scrollY") - scrolled) < 60  # The new row is above.
    assert page.run("document.querySelector('svg.chart').getAttribute('aria-label')").endswith("0.25 to 0.75")

    page.open(running.page("/"))
    page.run("document.querySelector('tbody a').focus()")
    running.step(3, 0.875)
    page.until("document.body.innerText.includes('3 / 4')")
    assert page.run("document.activeElement.textContent") == "calc"

    assert not page.complaints
    running.end()
    page.until("document.querySelector('.live').textContent === 'not connected'")
    page.complaints.clear()


PAGES = {
    "runs": "/",
    "run": "/runs/calc",
    "step": "/runs/calc/rollouts?step=1&mode=train",
    "group": "/runs/calc/groups/s1-g0-m0",
    "rollout": "/runs/calc/rollouts/s1-g0-m1",
    "call": "/runs/calc/call?rollout=s1-g0-m0&attempt=0&call=s1-g0-m0-c1",
    "health": "/runs/calc/health",
    "compare": "/compare?run=calc",
    "compare task": "/compare/task?a=calc@s1-g0-m0&b=calc@s1-g0-m1",
    "error": "/runs/nope",
}


def test_axe_finds_no_serious_fault_and_no_page_is_wider_than_a_phone(running: Running, page: Page) -> None:
    faults = {}
    for name, path in PAGES.items():
        for dark in (False, True):
            page.look(width=390, dark=dark)
            page.open(running.page(path))
            assert page.run("document.documentElement.scrollWidth") <= 390, name
            page.send("Runtime.evaluate", expression=AXE_FILE_PATH.read_text())
            violations = page.run("axe.run().then((all) => all.violations)")
            serious = [v for v in violations if v["impact"] in ("serious", "critical")]
            if serious:
                faults[name, dark] = [(v["id"], [node["html"][:200] for node in v["nodes"]]) for v in serious]
    page.complaints[:] = [c for c in page.complaints if "404" not in c]  # The status of the last page.
    assert not faults


@pytest.mark.parametrize(("path", "columns"), [("/", ["before", "after"]), (PAGES["step"], ["reward", "advantage"])])
def test_a_phone_shows_the_numbers_that_matter(running: Running, page: Page, path: str, columns: list[str]) -> None:
    page.look(width=390)
    page.open(running.page(path))
    for column in columns:
        edge = page.run(
            f"[...document.querySelectorAll('thead th')].find((th) => th.innerText.includes('{column}'))"
            ".getBoundingClientRect().right"
        )
        assert 0 < edge <= 390, column


def test_keys_lead_through_a_page(running: Running, page: Page) -> None:
    page.open(running.page(PAGES["step"]))
    page.press("j")
    page.press("j")
    page.press("k")
    assert page.run("document.activeElement.getAttribute('href')") == "/runs/calc/groups/s1-g0-m0"
    page.press("/")
    assert page.run("document.activeElement.name") == "text"
    page.run("document.activeElement.blur()")
    page.press("?")
    assert page.run("document.getElementById('help').open")
    page.run("document.getElementById('help').close()")
    page.until("document.activeElement === document.body")
    page.press("u")
    page.until("location.pathname === '/runs/calc'")


def test_filters_are_set_by_typing_and_are_in_the_address(running: Running, page: Page) -> None:
    page.open(running.page(PAGES["step"]))
    page.click("document.querySelector('input[type=search]')")
    for letter in "it is 41":
        page.press(letter)
    page.run("document.querySelector('[name=tool_status]').value = 'error'")
    page.click("document.querySelector('.filters button')")
    page.until("location.search.includes('text=it+is+41') && location.search.includes('tool_status=error')")
    page.until("document.body && document.body.innerText.includes('1 of 4 rollouts')")
    assert page.run("document.querySelectorAll('tbody.group').length") == 1
    assert page.run("document.querySelector('[name=tool_status]').value") == "error"


def test_runs_are_chosen_and_compared_without_typing(running: Running, page: Page) -> None:
    page.open(running.page("/"))
    page.run("document.querySelector('input[type=checkbox]').click()")
    running.step(2, 0.75)
    page.until("document.body.innerText.includes('2 / 4')")
    page.run("document.querySelector('button[form=chosen]').click()")
    page.until("location.pathname === '/compare' && document.querySelector('form.filters')")
    assert page.run("location.search") == "?run=calc"
