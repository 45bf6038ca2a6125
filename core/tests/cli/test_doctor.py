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
from agl_core.cli.upstreams import missing_ids

from .run_stack import Bench, bench


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Bench]:
    with bench(tmp_path) as found:
        yield found


def completion() -> dict[str, Any]:
    """What a server that returns ids answers."""
    choice = {"token_ids": [5, 6, 7], "logprobs": {"content": [{"logprob": -0.5}] * 3}}
    return {"prompt_token_ids": [1, 2], "choices": [choice]}


@pytest.mark.parametrize("field", ["prompt_token_ids", "token_ids", "logprobs"])
def test_what_is_missing_is_named(field: str) -> None:
    whole = completion()
    whole.pop(field, None)
    whole["choices"][0].pop(field, None)
    assert missing_ids(whole) == f"its replies lack {field}"


def test_what_only_limits_is_a_note(running: Bench) -> None:
    running.upstream.returns_ids = False
    found = running.agl("doctor", "--upstream", running.upstream.url)
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"ok    model server: {running.upstream.url} answers, with served" in found.stdout
    assert "note  token ids: its replies lack prompt_token_ids, token_ids, logprobs" in found.stdout


def test_what_is_broken_is_an_error_with_a_remedy(agl: Agl) -> None:
    found = agl("doctor", "no-such.toml")
    assert found.returncode == 1
    assert "FAIL  configuration: The configuration no-such.toml does not exist" in found.stdout
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
