"""What keeps bad versions from users: whole plays of the example, with real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from play import Result, play

pytestmark = [pytest.mark.storm, pytest.mark.timeout(1200)]


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Result]:
    """Plays it in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda name: play(name, 1, None, ())


def learned(result: Result) -> list[dict[str, Any]]:
    """The decisions on versions that were learned."""
    return [each for each in result["decisions"] if each["version"]]


def test_the_gate_stops_what_is_learned_from_feedback_that_is_turned_round(played: Callable[[str], Result]) -> None:
    result = played("inverted")
    states = {each["state"] for each in learned(result)}
    assert "rejected" in states
    assert states <= {"candidate", "rejected"}, "no version that was learned ever answered"
    assert mean(result["right"]) > 0.9


def test_the_canary_stops_what_the_gate_cannot_see(played: Callable[[str], Result]) -> None:
    decisions = learned(played("unseen"))
    states = [each["state"] for each in decisions if each["version"] == decisions[0]["version"]]
    assert states == ["candidate", "passed", "canary", "rolled_back"]
    assert "stable" not in {each["state"] for each in decisions}
