"""Episodes in a file: every one comes back exactly, and a line that is none is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agl_core
from agl_core.errors import EpisodesError
from agl_core.types import Episode

from .any_records import exactly, records


@settings(max_examples=25)
@given(st.lists(records(Episode), max_size=2))
def test_every_episode_comes_back_exactly(tmp_path_factory: pytest.TempPathFactory, episodes: list[Episode]) -> None:
    path = tmp_path_factory.mktemp("episodes") / "episodes.jsonl"
    agl_core.save_episodes(path, episodes)

    assert exactly(agl_core.load_episodes(path)) == exactly(episodes)
    strict = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [line["rollout"] for line in strict] == [episode.rollout for episode in episodes]


MINIMAL: dict[str, Any] = {
    "rollout": "r",
    "attempt": 0,
    "group": "g",
    "member": 0,
    "task": {"id": "t", "input": "2 + 2"},
    "mode": "train",
    "ending": "finished",
    "transitions": [],
}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[]", "it must be an object (Episode), not []"),
        ("{", "Expecting property name"),
        (json.dumps({**MINIMAL, "mode": "training"}), "mode must be one of train, eval-greedy, eval-sampled"),
        (json.dumps({**MINIMAL, "terminal": True}), "terminal must be a number, not True"),
        (json.dumps({**MINIMAL, "member": "0"}), "member must be an integer, not '0'"),
        (json.dumps({**MINIMAL, "reward": 1.0}), "Episode has no field 'reward'"),
        (json.dumps({**MINIMAL, "transitions": {}}), "transitions must be a list"),
        (json.dumps({**MINIMAL, "transitions": [{"key": {}}]}), "transitions[0] lacks the field 'agent'"),
        (json.dumps({**MINIMAL, "task": {"id": "t"}}), "task lacks the field 'input'"),
        (json.dumps({**MINIMAL, "task": {"id": "t", "input": 1, "metadata": []}}), "task.metadata must be an object"),
    ],
)
def test_a_line_that_is_no_episode_is_named(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps(MINIMAL) + "\n\n" + line + "\n")

    with pytest.raises(EpisodesError) as raised:
        agl_core.load_episodes(path)

    assert str(raised.value).startswith(f"Line 3 of {path} is no episode: ")
    assert problem in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(EpisodesError, match=r"nothing\.jsonl cannot be read: .*No such file"):
        agl_core.load_episodes(tmp_path / "nothing.jsonl")
