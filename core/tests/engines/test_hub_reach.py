"""A model of the hub that cannot be had is found out before an engine's process starts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agl_core.engines.hub import check_models
from agl_core.errors import EngineError

MODEL = "nobody/no-such-model"


class _NotFound(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        self.send_response(404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that does not answer."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    return tmp_path / "hub"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that has no model: what it is asked for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _NotFound)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    yield server.asked  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hub_that_does_not_answer_is_named_with_what_helps(cache: Path) -> None:
    with pytest.raises(EngineError, match=rf"no folder '{MODEL}'.*{cache}.*127\.0\.0\.1:1 does not.*HF_HUB_OFFLINE=1"):
        check_models([MODEL])


def test_folders_and_downloaded_models_need_no_hub(tmp_path: Path, cache: Path) -> None:
    downloaded = cache / "models--nobody--no-such-model" / "snapshots" / "4f1c"
    downloaded.mkdir(parents=True)
    (downloaded / "config.json").write_text("{}")
    check_models([str(tmp_path), MODEL])


def test_a_hub_that_answers_leaves_the_rest_to_the_engine(hub: list[str]) -> None:
    check_models([MODEL, MODEL])
    assert hub == [f"/{MODEL}/resolve/main/config.json"]


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_the_hub_is_not_asked(hub: list[str], monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(EngineError, match=r"is not asked, as HF_HUB_OFFLINE"):
        check_models([MODEL])
    assert hub == []
