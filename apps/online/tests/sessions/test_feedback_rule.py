"""What users said of a session becomes its reward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agl_core.learning import ScoringRule, score
from agl_core.learning.transitions import is_distorted
from agl_core.testing import episodes as make
from agl_core.types import DropReason, Episode, Mode, Sampling
from agl_online.feedback import Feedback, users_said

FIRST, SECOND = "r-c0", "r-c1"


def said(call: str | None = None, **rewards: float) -> Feedback:
    return Feedback("r", f"{call}-{rewards}", 0.0, rewards, call)


def session(*given: Feedback, calls: int = 2, **changes: Any) -> Episode:
    tokens = np.arange(3, dtype=np.int32)
    ids = {"prompt_ids": tokens, "response_ids": tokens, "logprobs": np.full(3, -0.5, np.float32)}
    transitions = [make.transition(turn, **{**ids, **changes}) for turn in range(calls)]
    return make.episode(*transitions, mode=Mode.USE, annotations=tuple(each.annotation for each in given))


async def scored(episode: Episode, weight: float = 1.0) -> Episode:
    found, errors = await score(episode, [ScoringRule("users", users_said, weight)], {})
    assert not errors
    return found


async def test_what_is_said_of_a_session_is_its_terminal_reward_and_of_a_call_that_calls_own() -> None:
    found = await scored(session(said(thumbs=1.0), said(SECOND, thumbs=0.0), said(FIRST, helpful=0.5)))
    assert found.terminal == 1.0
    assert [t.reward for t in found.transitions] == [0.5, 0.0]
    assert [len(t.rewards) for t in found.transitions] == [1, 1], "a thumbs down is a reward of 0, not none"
    only_calls = await scored(session(said(SECOND, thumbs=1.0)))
    assert (only_calls.terminal, [len(t.rewards) for t in only_calls.transitions]) == (0.0, [0, 1])


async def test_names_are_weighed_and_those_that_were_not_said_do_not_count() -> None:
    given = session(said(thumbs=1.0, helpful=0.0), said(rude=0.0))
    assert users_said(given) == {"session": pytest.approx(1 / 3)}
    assert users_said(given, weights={"thumbs": 3.0, "rude": 0.0}) == {"session": pytest.approx(3 / 4)}
    assert users_said(given, weights={"thumbs": 0.0, "helpful": 0.0, "rude": 0.0}) is None
    assert users_said(session(said(thumbs=0.0), said(thumbs=1.0))) == {"session": 1.0}, "the later one counts"


async def test_missing_feedback_is_missing() -> None:
    silent = await scored(session())
    assert (silent.dropped, silent.terminal) == (DropReason.NO_REWARD, None)
    observed = await scored(session(said(thumbs=1.0)), weight=0.0)
    assert observed.dropped is DropReason.NO_REWARD, "a rule without a weight only looks"


@pytest.mark.parametrize(
    ("request_fields", "sampling", "distorted"),
    [
        ({}, {}, False),
        ({}, {"temperature": 0.3}, False),
        ({}, {"temperature": 0.0}, True),
        ({}, {"top_p": 0.9}, True),
        ({"top_k": 40}, {}, True),
        ({"top_k": -1, "frequency_penalty": 0, "logit_bias": {}, "min_p": None}, {}, False),
        ({"presence_penalty": 0.5}, {}, True),
        ({"logit_bias": {"17": -100}}, {}, True),
    ],
)
def test_what_an_application_asks_for_decides(
    request_fields: dict[str, Any], sampling: dict[str, float], distorted: bool
) -> None:
    request = {"messages": [], **request_fields}
    call = make.call(request=request, effective=Sampling(**{"temperature": 1.0, "top_p": 1.0, **sampling}))
    assert is_distorted(call, Mode.USE) is distorted
    assert not is_distorted(call, Mode.TRAIN), "the gateway leaves these fields out in training"
