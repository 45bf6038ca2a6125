"""A service that refuses, fails, is silent, or lets a job wait is explained: a server on this machine does all that."""

from __future__ import annotations

import json
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

Answer: TypeAlias = tuple[int, Mapping[str, Any]] | None
"""A status and a body; None: the connection ends without an answer."""


@contextmanager
def serving(answer: Callable[[str, Mapping[str, Any]], Answer]) -> Iterator[str]:
    """A server's address, while the block runs; `answer` gets a request's path behind `/api/v1/`, and its body."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            size = int(self.headers.get("content-length", 0))
            sent, kind = self.rfile.read(size), self.headers.get("content-type", "")
            answered = answer(self.path.removeprefix("/api/v1/"), json.loads(sent) if "json" in kind else {})
            if answered is None:
                self.close_connection = True
                return
            status, content = answered
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
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
    """The client tries again at once, gives up after that, not after five minutes, and tells at once what waits."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-anything")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setattr("tinker._base_client.BaseClient._calculate_retry_timeout", lambda *arguments: 0.0)
    holder = "tinker.lib.internal_client_holder.InternalClientHolder"
    monkeypatch.setattr(f"{holder}._is_retryable_exception", lambda *arguments: False)
    monkeypatch.setattr("tinker.lib.queue_state_logger.PAUSE_GRACE_PERIOD", 0.0, raising=False)


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
        Service(TinkerOptions(base_url=url)).sampler_of("model")
    assert ", asked for a s" in str(raised.value)


class Paused:
    """A service that has a model, whose other jobs wait, until `refusal` is its answer to them."""

    refusal: Answer = None

    def __call__(self, path: str, body: Mapping[str, Any]) -> Answer:
        if path == "create_session":
            return 200, {"type": "create_session", "session_id": "session"}
        if path == "get_server_capabilities":
            return 200, {"supported_models": []}
        if path != "retrieve_future":
            return 200, {"request_id": path, "model_id": "model", "model_data": {}}
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
        reason = "Training for model is paused. Reason: Tinker backend is running short on capacity"
        assert any(reason in warning for warning in told), told
        paused.refusal = 403, {"detail": "the key has ended"}
        with pytest.raises(EngineError, match=r"the key has ended.* Look at the key in TINKER_API_KEY"):
            trainer.logprobs(batch())


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
