"""`agl doctor` finds what is wrong with a model server and says what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agl_command import Agl, agl_in_process  # noqa: F401
from typer.testing import CliRunner

from agl_core.cli import app
from agl_core.cli.upstreams import examine
from agl_core.testing.scripts import Raw

from .run_stack import Bench, bench


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Bench]:
    with bench(tmp_path) as found:
        yield found


def completion(**changes: Any) -> dict[str, Any]:
    """What a server that returns ids answers: two prompt tokens, three sampled."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "OK"},
        "finish_reason": "stop",
        "token_ids": [5, 6, 7],
        "logprobs": {"content": [{"logprob": -0.5}] * 3},
    }
    return {
        "prompt_token_ids": [1, 2],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3},
        "choices": [{**choice, **changes.pop("choice", {})}],
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({}, ""),
        ({"prompt_token_ids": [1]}, "1 prompt ids, but the reply counts 2 tokens"),
        ({"choice": {"token_ids": [5, 6]}}, "2 response ids, but the reply counts 3 tokens"),
        ({"choice": {"logprobs": {"content": [{"logprob": -1}]}}}, "3 response ids, but 1 log-probabilities"),
        ({"choice": {"logprobs": {"content": [{"logprob": 0.5}] * 3}}}, "above 0"),
        ({"choice": {"logprobs": {"content": [{"logprob": float("nan")}] * 3}}}, "not a number"),
    ],
)
def test_ids_that_do_not_go_together_are_found(changes: dict[str, Any], doubt: str) -> None:
    probe = examine(completion(**changes))
    assert (probe.returns_ids, bool(probe.doubts), probe.missing) == (True, bool(doubt), "")
    assert doubt in " ".join(probe.doubts)


@pytest.mark.parametrize("field", ["prompt_token_ids", "token_ids", "logprobs"])
def test_what_is_missing_is_named(field: str) -> None:
    whole = completion()
    whole.pop(field, None)
    whole["choices"][0].pop(field, None)
    probe = examine(whole)
    assert (probe.returns_ids, probe.missing) == (False, f"its replies lack {field}")


def test_what_only_limits_is_a_note(running: Bench) -> None:
    running.upstream.returns_ids = False
    found = running.agl("doctor", "--upstream", running.upstream.url)
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"ok    model server: {running.upstream.url} answers, with served" in found.stdout
    assert "note  token ids: its replies lack prompt_token_ids, token_ids, logprobs" in found.stdout


def test_what_is_broken_is_an_error_with_a_remedy(running: Bench, agl: Agl) -> None:
    running.answers(Raw(json.dumps(completion(prompt_token_ids=[1])).encode()))
    found = agl("doctor", "no-such.toml", "--upstream", running.upstream.url)
    assert found.returncode == 1
    assert "FAIL  configuration: The configuration no-such.toml does not exist" in found.stdout
    assert "FAIL  token ids: 1 prompt ids, but the reply counts 2 tokens\n      → training on them" in found.stdout
    listed = json.loads(agl("doctor", "no-such.toml", "--json").stdout)
    assert [each["what"] for each in listed if each["mark"] == "FAIL"] == ["configuration"]


def test_a_run_without_steps_one_with_alarms_and_one_with_a_damaged_line(tmp_path: Path) -> None:
    def doctor() -> tuple[int, str]:
        result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
        return result.exit_code, result.output

    (tmp_path / "config.toml").write_text("config_version = 1\n[train]\nsteps = 3\n")
    assert doctor() == (0, f"ok    run: {tmp_path}: stopped, 0 steps made\nok    alarms: no step was made yet\n")
    alarm = '{"name": "truncated", "seen": "0.4 are cut", "remedy": "Raise it."}'
    (tmp_path / "metrics.jsonl").write_text(
        f'{{"step": 1, "kind": "train", "alarm/truncated": 1.0, "alarms": [{alarm}]}}\n'
    )
    status, said = doctor()
    assert (status, "note  alarm truncated, since step 1: 0.4 are cut\n      → Raise it.\n" in said) == (
        0,
        True,
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "ki\n{"step": 3, "kind": "train"}\n')
    status, said = doctor()
    assert (status, "FAIL  metrics: line 2 of " in said) == (1, True)
    assert "truncated, step 1: " in said, "it holds no more"
