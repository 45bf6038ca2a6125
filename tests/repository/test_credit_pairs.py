"""Which algorithm goes with which credit rule: the verdict on every pair that is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agl_core import kinds
from agl_core.config import check, load
from agl_core.errors import CapabilityError
from agl_core.plugins import Plugins

CREDIT = {
    "identical": {"return"},
    "discounted": {"return"},
    "stepwise": {"return"},
    "air": {"return"},
    "immediate": {"reward", "return"},
}
"""What each rule's values can be read as."""
ALGORITHMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "grpo": ("grpo", {}, "return"),
    "grpo, no KL": ("grpo", {"beta": "0.0"}, "return"),
    "grpo, sequence ratio": ("grpo", {"ratio": "'sequence'"}, "return"),
    "reinforce++": ("reinforce++", {}, "return"),
    "reinforce++, KL": ("reinforce++", {"beta": "0.1"}, "return"),
    "reinforce++ across calls": ("reinforce++", {"across_calls": "true", "gamma": "0.9"}, "reward"),
    "ppo": ("ppo", {}, "return"),
    "ppo, KL": ("ppo", {"beta": "0.1"}, "return"),
    "ppo across calls": ("ppo", {"across_calls": "true"}, "reward"),
}
"""Name and options of each algorithm, and what it takes."""
PAIRS = [(algorithm, credit) for algorithm in ALGORITHMS for credit in CREDIT]


def test_the_lists_are_whole() -> None:
    plugins = Plugins.load()
    assert set(plugins.components(kinds.CREDIT)) == set(CREDIT)
    assert set(plugins.components(kinds.ALGORITHM)) == {name for name, _, _ in ALGORITHMS.values()}


@pytest.mark.parametrize(("algorithm", "credit"), PAIRS, ids=[f"{a} + {c}" for a, c in PAIRS])
def test_a_return_is_counted_once(tmp_path: Path, algorithm: str, credit: str) -> None:
    name, options, takes = ALGORITHMS[algorithm]
    lines = "".join(f"{key} = {value}\n" for key, value in options.items())
    config = tmp_path / "train.toml"
    config.write_text(
        f"""config_version = 1
[agent]
entry = "agent:run"
[tasks.train]
source = "jsonl"
path = "tasks.jsonl"
[policies.default.model]
path = "some/model"
[engine]
name = "torch"
[algorithm]
name = "{name}"
[algorithm."{name}"]
{lines}
[credit]
name = "{credit}"
"""
    )
    loaded = load(config)
    if takes in CREDIT[credit]:
        check(loaded)
        assert loaded.policies["default"].credit_kind == takes
        return
    with pytest.raises(CapabilityError) as error:
        check(loaded)
    wrong = "a return would be counted twice" if takes == "reward" else "the time axis has no owner"
    assert wrong in str(error.value)
    assert "that yields" in str(error.value)
