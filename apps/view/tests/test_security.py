"""Who may see the pages, what a browser may do with them, and `agl view` beside a run that is written."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from agl_command import Agl, Command, agl_in_process  # noqa: F401
from starlette.testclient import TestClient

from agl_core.errors import ServerError, StoreError
from agl_server.store.connections import is_written
from agl_server.store.sqlite import SqliteStore
from agl_view.serving import make_app, shown_beside

from .conftest import HERE, TOKEN, Folder, rollout


@pytest.fixture
def stranger(tmp_path: Path) -> TestClient:
    return TestClient(make_app([tmp_path], TOKEN), "http://127.0.0.1:8000", follow_redirects=False, client=HERE)


@pytest.mark.parametrize("address", ["/", "/runs/calc", "/static/style.css", "/changed", "/?token=wrong", "/?token=é"])
def test_without_the_token_nothing_is_shown(stranger: TestClient, address: str) -> None:
    answer = stranger.get(address)

    assert answer.status_code == 401
    assert "agl view printed" in answer.text


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_have(stranger: TestClient) -> None:
    answer = stranger.get(f"/runs/calc/rollouts?step=1&token={TOKEN}&text=a%26b")

    assert answer.status_code == 303
    assert answer.headers["location"] == "/runs/calc/rollouts?step=1&text=a%26b"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN not in answer.headers["set-cookie"]
    elsewhere = stranger.get(f"/%2Fevil.example/50%25?token={TOKEN}").headers["location"]
    assert elsewhere == "/evil.example/50%25", "the redirect stays here"


def test_the_token_on_the_browsers_command_line_counts_once(tmp_path: Path) -> None:
    app = make_app([tmp_path], TOKEN, once="once")
    first, second = (TestClient(app, "http://127.0.0.1:8000", follow_redirects=False, client=HERE) for _ in range(2))
    statuses = [
        browser.get(f"/?token={token}").status_code
        for browser, token in ((first, "once"), (first, ""), (second, "once"), (second, TOKEN))
    ]
    assert statuses == [303, 303, 401, 303]


def test_the_cookie_of_another_start_does_not_count(stranger: TestClient, tmp_path: Path) -> None:
    given = stranger.get(f"/?token={TOKEN}").headers["set-cookie"].partition(";")[0]
    again = TestClient(make_app([tmp_path], TOKEN), "http://127.0.0.1:8000", client=HERE)

    assert again.get("/", headers={"cookie": given}).status_code == 401


def test_loopback_by_any_name_and_port_reads_and_nothing_else(runs: Folder) -> None:
    for host in ("localhost:9000", "127.0.0.1", "[::1]:8000"):
        assert runs.browser.get("/", headers={"host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example:8000", "10.0.0.1", ""):
        assert runs.browser.get("/", headers={"host": host}).status_code == 421, host
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert runs.browser.request(method, "/").status_code == 405


@pytest.mark.parametrize("address", ["/", "/nothing", "/static/style.css", "/changed"])
def test_browsers_load_nothing_from_elsewhere(runs: Folder, address: str) -> None:
    headers = runs.browser.get(address).headers

    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"


ELSEWHERE = ("10.0.0.7", 50000)
KEY = "the-operator's-key"


def elsewhere(folder: Path, key: str | None) -> TestClient:
    return TestClient(make_app([folder], TOKEN, key), "http://trainer.example:8000", client=ELSEWHERE)


def test_another_machine_needs_the_operators_key(tmp_path: Path) -> None:
    browser = elsewhere(tmp_path, KEY)

    refused = browser.get(f"/?token={TOKEN}")

    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic ")
    assert "set-cookie" not in refused.headers
    assert browser.get("/", auth=("me", "wrong")).status_code == 401
    assert browser.get("/", headers={"authorization": "Basic é".encode()}).status_code == 401
    assert browser.get("/", auth=("me", KEY)).status_code == 200
    assert browser.get("/", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


def test_without_an_operators_key_no_other_machine_sees_anything(tmp_path: Path) -> None:
    browser = elsewhere(tmp_path, None)

    assert browser.get(f"/?token={TOKEN}", headers={"host": "127.0.0.1"}).status_code == 401
    assert browser.get("/", auth=("me", "")).status_code == 421


def test_the_token_counts_on_this_machine_beside_an_operators_key(tmp_path: Path) -> None:
    browser = TestClient(make_app([tmp_path], TOKEN, KEY), "http://10.0.0.5:8000", client=("10.0.0.5", 1))

    assert browser.get("/", auth=("me", KEY)).status_code == 401
    assert browser.get(f"/?token={TOKEN}").status_code == 200
    assert browser.get(f"/?token={TOKEN}", follow_redirects=False).headers["location"] == "/"


def test_the_printed_address_opens_and_ctrl_c_ends_it(calc: Folder) -> None:
    view = Command.start("view", "--no-browser", log=calc.path.parent / "log.txt")
    try:
        view.until(lambda: "\n" in view.output())
        [address] = re.findall(r"^view:  (http://127\.0\.0\.1:\d+/\?token=\S{30,})\n", view.output())
        with httpx.Client(follow_redirects=True) as browser:
            assert browser.get(address.partition("?")[0]).status_code == 401
            assert "/runs/calc" in browser.get(address).text
        view.process.send_signal(signal.SIGINT)
        assert view.wait(60) in (0, 130)
        assert "Traceback" not in view.output()
    finally:
        view.stop()


def test_a_folder_without_runs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agl: Agl) -> None:
    monkeypatch.chdir(tmp_path)
    done = agl("view", "nope", "--no-browser")

    assert done.returncode == 2
    assert "nope is not a run's folder" in done.stderr


PATIENCE = 30.0


def opened(address: str) -> str:
    with httpx.Client(follow_redirects=True, timeout=PATIENCE) as browser:
        return browser.get(address).text


async def test_a_run_is_shown_while_this_process_writes_it_and_its_lock_stays(runs: Folder) -> None:
    folder = await asyncio.to_thread(runs.trained)
    before = psutil.Process().children()

    async with SqliteStore(folder / "store.sqlite") as store, shown_beside(folder, "127.0.0.1", 0, None) as address:
        with pytest.raises(ServerError, match="use port 0 for a free one"):
            async with shown_beside(folder, "127.0.0.1", httpx.URL(address).port or 0, None):
                pass
        assert psutil.Process().children() == before, "no process is started before someone looks"
        page = await asyncio.to_thread(opened, address)
        assert len(psutil.Process().children()) == len(before) + 1
        await store.put(*rollout("s2-g0-m0", answer="9", reward=1.0, advantage=0.1))
        later = await asyncio.to_thread(opened, address)
        refused = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SECOND_WRITER, folder / "store.sqlite", stderr=subprocess.PIPE
        )
        _, errors = await refused.communicate()

    assert "running" in page
    assert 'data-changed="/runs/calc/changed"' in page
    assert "data-changed" not in runs.page("/runs/calc"), "it has ended"
    assert "reward 2: 1 rollouts" in later
    assert StoreError.__name__.encode() in errors
    with pytest.raises(httpx.ConnectError):
        await asyncio.to_thread(opened, address)
    assert psutil.Process().children() == before


SECOND_WRITER = """
import asyncio, sys
from pathlib import Path
from agl_server.store.sqlite import SqliteStore
asyncio.run(SqliteStore(Path(sys.argv[1])).open())
"""


SHOWING = """
import asyncio, sys
from pathlib import Path
from agl_server.store.sqlite import SqliteStore
from agl_view.serving import shown_beside

async def show(folder):
    async with SqliteStore(folder / "store.sqlite"), shown_beside(folder, "127.0.0.1", 0, None) as address:
        print(address, flush=True)
        await asyncio.Event().wait()

asyncio.run(show(Path(sys.argv[1])))
"""


def test_the_pages_end_with_the_process_that_shows_them(runs: Folder) -> None:
    folder = runs.trained()
    command = [sys.executable, "-c", SHOWING, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as showing:
        try:
            address = showing.stdout.readline().strip()
            assert "calc" in opened(address)
            assert is_written(folder / "store.sqlite")
        finally:
            showing.kill()
            showing.communicate()
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(httpx.TransportError):
        while opened(address) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert time.monotonic() < deadline, "the pages are still there"
    assert not is_written(folder / "store.sqlite")
