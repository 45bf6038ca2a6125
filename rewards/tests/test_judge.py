"""The judge, against a real HTTP server that answers like an OpenAI-compatible endpoint."""

from __future__ import annotations

import doctest
import importlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agl_core.errors import ConfigError
from agl_rewards import Judge, JudgeError, JudgeOptions


def test_docstring_examples_run() -> None:
    outcome = doctest.testmod(importlib.import_module("agl_rewards.judge"))
    assert outcome.attempted >= 1
    assert outcome.failed == 0


def test_the_example_of_a_configuration_is_valid() -> None:
    example = (Judge.__doc__ or "").split("[rewards.judge]")[1].split("\n\n")[0]
    assert JudgeOptions.model_validate(tomllib.loads(example)).cache == Path("judgements")


async def test_the_model_is_asked_with_rubric_task_and_answer(make: Any, endpoint: Any) -> None:
    rule = endpoint.judge(make, field="gold")
    assert await rule(make.episode(question="Who?", result="Zoë", metadata={"gold": "Zoe"})) == 0.7
    [request] = endpoint.requests
    assert (request["path"], request["model"], request["temperature"]) == ("/v1/chat/completions", "m", 0)
    assert "Be {polite}." in request["messages"][0]["content"]
    assert json.loads(request["messages"][1]["content"]) == {"task": "Who?", "answer": "Zoë", "expected": "Zoe"}
    assert endpoint.authorizations == [None]


async def test_what_was_judged_is_not_asked_again(make: Any, endpoint: Any) -> None:
    rule = endpoint.judge(make)
    same, other = make.episode(result="a"), make.episode(result="b")
    assert [await rule(each) for each in (same, same, other)] == [0.7, 0.7, 0.7]
    assert len(endpoint.requests) == 2


async def test_a_cache_folder_keeps_scores_between_runs(make: Any, endpoint: Any, tmp_path: Path) -> None:
    episode = make.episode(result="a")
    folder = tmp_path / "deep" / "judgements"
    assert await endpoint.judge(make, cache=str(folder))(episode) == 0.7
    endpoint.reply = '{"score": 1}'
    assert await endpoint.judge(make, cache=str(folder))(episode) == 0.7
    assert await endpoint.judge(make, cache=str(folder), rubric="Be brief.")(episode) == 0.1
    assert await endpoint.judge(make, cache=str(folder), model="n")(episode) == 0.1
    elsewhere = endpoint.url.replace("127.0.0.1", "localhost")
    assert await endpoint.judge(make, cache=str(folder), base_url=elsewhere)(episode) == 0.1
    assert len(endpoint.requests) == 4


async def test_the_budget_ends_requests_but_not_cached_scores(make: Any, endpoint: Any) -> None:
    rule = endpoint.judge(make, max_calls=2)
    assert [await rule(make.episode(result=each)) for each in "ab"] == [0.7, 0.7]
    with pytest.raises(JudgeError, match=r"asked 2 times.*Raise `max_calls`"):
        await rule(make.episode(result="c"))
    assert await rule(make.episode(result="a")) == 0.7
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize("reply", ["Good answer!", '{"score": 11}', '{"score": -1}', '{"score": "high"}', "", None])
async def test_a_reply_without_a_score_is_an_error_and_is_not_kept(make: Any, endpoint: Any, reply: str | None) -> None:
    rule = endpoint.judge(make)
    endpoint.reply = reply
    with pytest.raises(JudgeError, match="no score from 0 to 10"):
        await rule(make.episode(result="a"))
    endpoint.reply = 'First {"score": 2}. On reflection: {"score": 10}'
    assert await rule(make.episode(result="a")) == 1.0


async def test_an_endpoint_that_fails_is_named(make: Any, endpoint: Any) -> None:
    endpoint.status = 500
    with pytest.raises(JudgeError, match=rf"{endpoint.url}/chat/completions did not answer .*500"):
        await endpoint.judge(make)(make.episode(result="a"))
    with pytest.raises(JudgeError, match="did not answer"):
        await endpoint.judge(make, base_url="http://127.0.0.1:1/v1")(make.episode(result="a"))
    with pytest.raises(JudgeError, match="did not answer"):
        await endpoint.judge(make, base_url="nonsense")(make.episode(result="a"))


async def test_the_key_comes_from_the_environment(make: Any, endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k1")
    await endpoint.judge(make, api_key_env="JUDGE_KEY")(make.episode(result="a"))
    assert endpoint.authorizations == ["Bearer k1"]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"'JUDGE_KEY'.*not set"):
        endpoint.judge(make, api_key_env="JUDGE_KEY")


@pytest.mark.parametrize("settings", [{"max_calls": 0}, {"timeout": 0}, {"modell": "m"}, {"max_concurrent": 0}])
def test_bad_settings_are_refused(make: Any, endpoint: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        endpoint.judge(make, **settings)
