"""A service that refuses, fails, is silent, or lets a job wait is explained: a server on this machine does all that."""

from __future__ import annotations

import io
import json
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from agl_core.config.sections import LoraSection
from agl_core.errors import EngineError
from agl_core.protocols import PolicySpec
from agl_tinker.plugin import TinkerOptions
from agl_tinker.process import STATE, TinkerServer
from agl_tinker.service import Service
from agl_tinker.trainer import PolicyTrainer

from .test_tinker_engine import SUM, batch

Answer: TypeAlias = tuple[int, Mapping[str, Any] | bytes] | None
"""A status and a body, or with 302 a header's place; None: the connection ends without an answer."""


@contextmanager
def serving(answer: Callable[[str, Mapping[str, Any]], Answer]) -> Iterator[str]:
    """A server's address, while the block runs; `answer` gets a request's path behind `/api/v1/`, and its body."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            size = int(self.headers.get("content-length", 0))
            answered = answer(self.path.removeprefix("/api/v1/"), json.loads(self.rfile.read(size) or "{}"))
            if answered is None:
                self.close_connection = True
                return
            status, content = answered
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            if status == 302:
                self.send_header("location", body.decode())
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client tries again at once, as often as ever."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-anything")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setattr("tinker._base_client.BaseClient._calculate_retry_timeout", lambda *arguments: 0.0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, {"detail": "no such key"}), "refused, .*401.*no such key.* Look at the key in TINKER_API_KEY."),
        ((403, {"detail": "not yours"}), "refused, .*403.*not yours.* Look at the key in TINKER_API_KEY."),
        ((402, {"detail": "no money"}), "refused, .*402.*no money.* Look at the quota, and at what is paid."),
        ((429, {"detail": "too much"}), "refused, .*429.*too much.* Look at the quota, and at what is paid."),
        ((500, {"detail": "broken"}), "failed, .*500.*broken"),
        (None, r"does not answer, .*\(APIConnectionError\). Look at engine.tinker.base_url and at the network"),
    ],
    ids=["key", "rights", "payment", "rate", "server", "network"],
)
def test_what_a_service_refuses_is_said_with_the_remedy(answer: Answer, said: str) -> None:
    with serving(lambda path, body: answer) as url, pytest.raises(EngineError, match=f"{url} {said}") as raised:
        Service(TinkerOptions(base_url=url))
    assert "asked for a session" in str(raised.value)


class Paused:
    """A service that has a model, whose other jobs wait, until `refusal` is its answer to them."""

    refusal: Answer = None

    def __call__(self, path: str, body: Mapping[str, Any]) -> Answer:
        if path == "create_session":
            return 200, {"type": "create_session", "session_id": "session"}
        if path == "get_server_capabilities":
            return 200, {"supported_models": []}
        if path != "retrieve_future":
            return 200, {"request_id": path, "model_id": "model"}
        if body["request_id"] == "create_model":
            return 200, {"type": "create_model", "model_id": "model"}
        time.sleep(0.02)
        return self.refusal or (408, {"queue_state": "paused_capacity"})


def test_a_job_that_waits_is_told_and_one_that_waits_too_long_is_given_up() -> None:
    told, paused = list[str](), Paused()
    with serving(paused) as url:
        service = Service(TinkerOptions(base_url=url, timeout=1.0), told.append)
        spec = PolicySpec("model", lora=LoraSection())
        client: Any = service.trains(spec, 0)
        limits = {"context_length": 64, "vocabulary": 24, "seed": 0, "steps": 1}
        trainer = PolicyTrainer(service, client, spec, SUM, reference=client, **limits)
        with pytest.raises(EngineError, match=r"does not answer, computing log-probabilities \(TimeoutError\)"):
            trainer.logprobs(batch())
        assert "Training for model is paused. Reason: Tinker backend is running short on capacity" in told[0]
        paused.refusal = 403, {"detail": "the key has ended"}
        with pytest.raises(EngineError, match=r"the key has ended.* Look at the key in TINKER_API_KEY"):
            trainer.logprobs(batch())


def archive(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


@pytest.mark.parametrize("path", ["tinker://run/sampler_weights/last", "tinker://run/last"], ids=["tinker", "skyrl-tx"])
def test_saved_weights_are_downloaded_from_where_the_service_says(path: str, tmp_path: Path) -> None:
    asked, content = list[str](), archive(weights=b"all of them")

    def answer(path: str, body: Mapping[str, Any]) -> Answer:
        asked.append(path)
        if path.startswith("training_runs"):
            return 302, f"{url}/store".encode()
        return (200, content) if path == "/store" else Paused()(path, body)

    with serving(answer) as url:
        service = Service(TinkerOptions(base_url=url))
        service.download(path, tmp_path / "model")
        assert (tmp_path / "model" / "weights").read_bytes() == b"all of them"
        assert f"training_runs/run/checkpoints/{path.removeprefix('tinker://run/')}/archive" in asked
        content = archive(**{"../outside": b"of the folder"})
        with pytest.raises(tarfile.OutsideDestinationError):
            service.download(path, tmp_path / "model")
    assert not (tmp_path / "outside").exists()


def test_a_checkpoint_counts_without_the_adapter(tmp_path: Path) -> None:
    """The service has the weights; the run says how to get them."""
    said = list[str]()
    with serving(Paused()) as url:
        engine: Any = object.__new__(TinkerServer)
        engine._tell, engine._service = said.append, Service(TinkerOptions(base_url=url, timeout=0.5))
        spec = PolicySpec("model", lora=LoraSection())
        client: Any = engine._service.trains(spec, 0)
        state = {"path": "tinker://run/weights/one"}
        engine._trainers = {"default": SimpleNamespace(client=client, spec=spec, version=1, state=lambda name: state)}
        engine.save(tmp_path)
    assert json.loads((tmp_path / "default" / STATE).read_text()) == state
    assert not (tmp_path / "default" / "model").exists()
    assert "does not answer, saving weights to download them" in said[0]
    assert "`tinker checkpoint download` gets it" in said[0]
