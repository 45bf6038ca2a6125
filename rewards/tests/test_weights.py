"""The README's configurations and functions, as a run would score with them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agl_core import kinds
from agl_core.builtin.credit import identical
from agl_core.capture import message_status
from agl_core.learning import ScoringRule, score
from agl_core.types import Ending

README = Path(__file__).parents[1] / "README.md"


def configurations() -> list[dict[str, Any]]:
    return [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)]


def scoring(make: Any, having: str) -> list[ScoringRule]:
    """The rules of the README's configuration that has this reward table."""
    [tables] = [c["rewards"] for c in configurations() if having in c.get("rewards", {})]
    rules = []
    for name, table in tables.items():
        weight, rule = table.pop("weight", 1.0), table.pop("rule", name)
        rules.append(ScoringRule(name, make.rule(kinds.REWARD, rule, **table), weight))
    return rules


async def judged(make: Any, having: str, result: str, *statuses: str) -> tuple[float | None, float]:
    """Terminal reward and return of an episode whose first call's tools ended like this."""
    tool_results = [make.tool_result(status) for status in statuses]
    episode = make.episode(tool_results, [], result=result, metadata={"result": "Paris"})
    scored, errors = await score(episode, scoring(make, having), dict.fromkeys(Ending, "score"))
    assert errors == []
    return scored.terminal, identical([scored])[0][0]


@pytest.mark.parametrize(("result", "value"), [("Paris", 1.0), ("London", 0.1), (" Paris\n", 0.9), ("in London", 0.0)])
async def test_correctness_and_format(make: Any, result: str, value: float) -> None:
    assert await judged(make, "correctness", result) == (pytest.approx(value), pytest.approx(value))


@pytest.mark.parametrize(
    ("result", "statuses", "terminal", "whole"),
    [
        ("Paris", [], 1.10, 1.10),
        ("Paris", ["ok"], 1.10, 1.30),
        ("Paris", ["ok", "error"], 1.10, 1.10),
        ("London", ["timeout", "empty"], 0.10, -0.30),
        ("in London", ["ok", "ok"], 0.0, 0.40),
    ],
)
async def test_completion_tool_success_and_format(
    make: Any, result: str, statuses: list[str], terminal: float, whole: float
) -> None:
    assert await judged(make, "completion", result, *statuses) == (pytest.approx(terminal), pytest.approx(whole))


def test_every_reward_table_of_the_readme_is_valid(make: Any) -> None:
    tables = [table for c in configurations() for table in c.get("rewards", {}).items()]
    assert len(tables) >= 6
    for name, table in tables:
        settings = {key: value for key, value in table.items() if key not in ("rule", "weight")}
        make.rule(kinds.REWARD, table.get("rule", name), **settings)


def test_the_table_of_what_messages_are_read_as_is_right() -> None:
    rows = dict(re.findall(r"^\| (.*?) \| (error|timeout|ok) \|$", README.read_text(), re.MULTILINE))
    assert len(rows) == 4
    for said, status in rows.items():
        for text in re.findall(r"`([^`]+)`", said.partition("; but not")[0]):
            assert str(message_status(text.replace("…", "it")).status) == status, text
