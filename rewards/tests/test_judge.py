"""The judge, against a real HTTP server that answers like an OpenAI-compatible endpoint."""

from __future__ import annotations

import doctest
import importlib
import json
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agl_core.errors import ConfigError
from agl_core.plugins import Kind
from agl_rewards import Judge, JudgeError, JudgeOptions


class Endpoint(ThreadingHTTPServer):
    """Answers chat completions with `reply`, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply: str | None = '{"score": 7}'
        self.status = 200
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append({"path": self.path, **json.loads(body)})
        self.server.authorizations.append(self.headers["Authorization"])
        answer = json.dumps({"choices": [{"message": {"content": self.server.reply}}]}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def judge(make: Any, endpoint: Endpoint, **settings: Any) -> Judge:
    built = make.rule(
        Kind.REWARD, "judge", **{"base_url": endpoint.url, "model": "m", "rubric": "Be {polite}.", **settings}
    )
    assert isinstance(built, Judge)
    return built


def test_docstring_examples_run() -> None:
    outcome = doctest.testmod(importlib.import_module("agl_rewards.judge"))
    assert outcome.attempted >= 1
    assert outcome.failed == 0


def test_the_example_of_a_configuration_is_valid() -> None:
    example = (Judge.__doc__ or "").split("[rewards.judge]")[1].split("\n\n")[0]
    assert JudgeOptions.model_validate(tomllib.loads(example)).cache == Path("judgements")


async def test_the_model_is_asked_with_rubric_task_and_answer(make: Any, endpoint: Endpoint) -> None:
    rule = judge(make, endpoint, field="gold")
    assert await rule(make.episode(question="Who?", result="Zoë", metadata={"gold": "Zoe"})) == 0.7
    [request] = endpoint.requests
    assert (request["path"], request["model"], request["temperature"]) == ("/v1/chat/completions", "m", 0)
    assert "Be {polite}." in request["messages"][0]["content"]
    assert json.loads(request["messages"][1]["content"]) == {"task": "Who?", "answer": "Zoë", "expected": "Zoe"}
    assert endpoint.authorizations == [None]


async def test_what_was_judged_is_not_asked_again(make: Any, endpoint: Endpoint) -> None:
    rule = judge(make, endpoint)
    same, other = make.episode(result="a"), make.episode(result="b")
    assert [await rule(each) for each in (same, same, other)] == [0.7, 0.7, 0.7]
    assert len(endpoint.requests) == 2


async def test_a_cache_folder_keeps_scores_between_runs(make: Any, endpoint: Endpoint, tmp_path: Path) -> None:
    episode = make.episode(result="a")
    folder = tmp_path / "deep" / "judgements"
    assert await judge(make, endpoint, cache=str(folder))(episode) == 0.7
    endpoint.reply = '{"score": 1}'
    assert await judge(make, endpoint, cache=str(folder))(episode) == 0.7
    assert await judge(make, endpoint, cache=str(folder), rubric="Be brief.")(episode) == 0.1
    assert await judge(make, endpoint, cache=str(folder), model="n")(episode) == 0.1
    elsewhere = endpoint.url.replace("127.0.0.1", "localhost")
    assert await judge(make, endpoint, cache=str(folder), base_url=elsewhere)(episode) == 0.1
    assert len(endpoint.requests) == 4


async def test_the_budget_ends_requests_but_not_cached_scores(make: Any, endpoint: Endpoint) -> None:
    rule = judge(make, endpoint, max_calls=2)
    assert [await rule(make.episode(result=each)) for each in "ab"] == [0.7, 0.7]
    with pytest.raises(JudgeError, match=r"asked 2 times.*Raise `max_calls`"):
        await rule(make.episode(result="c"))
    assert await rule(make.episode(result="a")) == 0.7
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize("reply", ["Good answer!", '{"score": 11}', '{"score": -1}', '{"score": "high"}', "", None])
async def test_a_reply_without_a_score_is_an_error_and_is_not_kept(
    make: Any, endpoint: Endpoint, reply: str | None
) -> None:
    rule = judge(make, endpoint)
    endpoint.reply = reply
    with pytest.raises(JudgeError, match="no score from 0 to 10"):
        await rule(make.episode(result="a"))
    endpoint.reply = 'First {"score": 2}. On reflection: {"score": 10}'
    assert await rule(make.episode(result="a")) == 1.0


async def test_an_endpoint_that_fails_is_named(make: Any, endpoint: Endpoint) -> None:
    endpoint.status = 500
    with pytest.raises(JudgeError, match=rf"{endpoint.url}/chat/completions did not answer .*500"):
        await judge(make, endpoint)(make.episode(result="a"))
    with pytest.raises(JudgeError, match="did not answer"):
        await judge(make, endpoint, base_url="http://127.0.0.1:1/v1")(make.episode(result="a"))
    with pytest.raises(JudgeError, match="did not answer"):
        await judge(make, endpoint, base_url="nonsense")(make.episode(result="a"))


async def test_the_key_comes_from_the_environment(
    make: Any, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k1")
    await judge(make, endpoint, api_key_env="JUDGE_KEY")(make.episode(result="a"))
    assert endpoint.authorizations == ["Bearer k1"]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"'JUDGE_KEY'.*not set"):
        judge(make, endpoint, api_key_env="JUDGE_KEY")


@pytest.mark.parametrize("settings", [{"max_calls": 0}, {"timeout": 0}, {"modell": "m"}])
def test_bad_settings_are_refused(make: Any, endpoint: Endpoint, settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        judge(make, endpoint, **settings)
