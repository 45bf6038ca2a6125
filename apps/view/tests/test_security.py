"""Who may see the pages, and what a browser may do with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from agl_view.serving import make_app

from .viewed_runs import HERE, TOKEN, Folder


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


def test_the_token_on_the_browsers_command_line_counts_once(tmp_path: Path) -> None:
    app = make_app([tmp_path], TOKEN, once="once")
    first, second = (TestClient(app, "http://127.0.0.1:8000", follow_redirects=False, client=HERE) for _ in range(2))
    statuses = [
        browser.get(f"/?token={token}").status_code
        for browser, token in ((first, "once"), (first, ""), (second, "once"), (second, TOKEN))
    ]
    assert statuses == [303, 303, 401, 303]


def test_the_redirect_stays_here(stranger: TestClient) -> None:
    answer = stranger.get(f"/%2Fevil.example/50%25?token={TOKEN}")

    assert answer.headers["location"] == "/evil.example/50%25"


def test_the_cookie_of_another_start_does_not_count(stranger: TestClient, tmp_path: Path) -> None:
    given = stranger.get(f"/?token={TOKEN}").headers["set-cookie"].partition(";")[0]
    again = TestClient(make_app([tmp_path], TOKEN), "http://127.0.0.1:8000", client=HERE)

    assert again.get("/", headers={"cookie": given}).status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8000", "10.0.0.1", ""])
def test_other_names_of_this_machine_are_refused(runs: Folder, host: str) -> None:
    assert runs.browser.get("/", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "[::1]:8000"])
def test_loopback_by_any_name_and_port(runs: Folder, host: str) -> None:
    assert runs.browser.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_pages_can_only_be_read(runs: Folder, method: str) -> None:
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
