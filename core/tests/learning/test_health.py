"""The verdict on a rollout, from what was recorded of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agl_core.learning.transitions import build_episode
from agl_core.testing import episodes as make
from agl_core.types import (
    Choice,
    DropReason,
    Ending,
    Episode,
    Evidence,
    FinishReason,
    PrefixBreak,
    Symptom,
    ToolResult,
    ToolStatus,
    Verdict,
)
from agl_server.health.rollouts import RolloutHealth, health_of


def reply(text: str, **changes: Any) -> Choice:
    return make.choice(message={"role": "assistant", "content": text}, **changes)


def built(
    *choices: Choice, results: tuple[ToolResult, ...] = (), ending: Ending = Ending.FINISHED, **call: Any
) -> Episode:
    calls = [make.call(number, choice, **call) for number, choice in enumerate(choices)]
    return build_episode(make.rollout(), make.attempt(ending=ending), calls, results)


def asks(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "thought at length"}, {"role": "tool", "content": text}]}


ASKS = make.choice(tool_calls=["c1"])
FAILED = make.tool_result("1", "c1", status=ToolStatus.ERROR)


def test_a_rollout_that_went_as_it_should() -> None:
    health = health_of(built(ASKS, reply("42"), results=(make.tool_result("1", "c1"),)))
    assert health == RolloutHealth()
    assert (health.verdict, health.text) == (Verdict.HEALTHY, "healthy")


@pytest.mark.parametrize(
    ("episode", "symptom"),
    [
        (built(reply("hi"), ending=Ending.TIMED_OUT), Symptom.ENDING),
        (built(reply("the end is miss", finish_reason=FinishReason.LENGTH)), Symptom.TRUNCATED),
        (built(reply("<tool>{", parse_error="no JSON")), Symptom.PARSE_ERROR),
        (built(reply("I see. " + "I think so too. " * 9)), Symptom.REPETITION),
        (built(reply("!" * 80)), Symptom.REPETITION),
        (built(reply("\ufffd\ufffd\x00 a")), Symptom.GIBBERISH),
        (built(reply("qf z", tokens=9, logprobs=np.full(9, -5.0, np.float32))), Symptom.GIBBERISH),
        (built(reply(" \n")), Symptom.EMPTY_ANSWER),
        (built(ASKS, reply("I failed."), results=(FAILED,)), Symptom.TOOLS_FAILED),
        (built(reply("hi"), prefix_broken=PrefixBreak.EDITED), Symptom.PREFIX_BROKEN),
        (built(reply(""), prefix_broken=PrefixBreak.REQUEST), Symptom.EMPTY_ANSWER),
        (built(reply("hi"), prompt_ids=np.arange(3), request=asks("one two three four")), Symptom.PROMPT_CUT),
        (built(reply("hi"), prompt_ids=np.arange(3), request=asks("x" * 512)), Symptom.PROMPT_CUT),
        (replace(built(reply("hi")), dropped=DropReason.REWARD_FAILED), Symptom.REWARD_FAILED),
    ],
)  # fmt: skip
def test_symptoms(episode: Episode, symptom: Symptom) -> None:
    health = health_of(episode)
    assert (health.verdict, health.symptoms) == (Verdict.UNHEALTHY, (symptom,))
    assert symptom.value.replace("_", " ") in health.text


@pytest.mark.parametrize("text", ["one two three", " " * 300, "x" * 511, "\n\n a\t b "])
def test_a_prompt_that_may_be_whole_is_not_marked(text: str) -> None:
    assert health_of(built(reply("hi"), prompt_ids=np.arange(3), request=asks(text))) == RolloutHealth()


@pytest.mark.parametrize(
    ("choice", "ending", "verdict"),
    [
        ("required", Ending.FINISHED, Verdict.HEALTHY),
        ({"type": "function", "function": {"name": "Weather"}}, Ending.FINISHED, Verdict.HEALTHY),
        ("auto", Ending.FINISHED, Verdict.UNOBSERVED),
        ("required", Ending.CRASHED, Verdict.UNHEALTHY),
    ],
)
def test_structured_output_by_a_tool_is_an_answer_and_not_a_tool_without_a_result(
    choice: Any, ending: Ending, verdict: Verdict
) -> None:
    request = {"messages": [{"role": "user", "content": "Bern?"}], "tool_choice": choice}
    assert health_of(built(ASKS, ending=ending, request=request)).verdict is verdict
    if choice == "required" and ending is Ending.FINISHED:
        another = built(ASKS, make.choice(tool_calls=["c2"]), request=request)
        assert health_of(another).verdict is Verdict.HEALTHY
        goes_on: Any = {"messages": [*request["messages"], ASKS.message], "tool_choice": choice}
        calls = [make.call(0, ASKS, request=request), make.call(1, make.choice(tool_calls=["c2"]), request=goes_on)]
        again = build_episode(make.rollout(), make.attempt(), calls)
        assert health_of(again).missing == (Evidence.TOOL_RESULTS,), "the first was no answer: the agent went on"


@pytest.mark.parametrize(
    ("episode", "evidence"),
    [
        (replace(built(reply("hi")), bypassed={"https://api.openai.com/v1/responses": 1}), Evidence.CALLS),
        (built(reply("hi", response_ids=None)), Evidence.TOKEN_IDS),
        (built(reply("hi", logprobs=None)), Evidence.TOKEN_IDS),
        (built(reply("hi"), prompt_ids=None), Evidence.TOKEN_IDS),
        (built(ASKS, reply("42")), Evidence.TOOL_RESULTS),
    ],
)
def test_missing_evidence(episode: Episode, evidence: Evidence) -> None:
    health = health_of(episode)
    assert (health.verdict, health.missing) == (Verdict.UNOBSERVED, (evidence,))


def test_agents_without_names_count_only_where_there_are_several() -> None:
    def calls(*agents: tuple[str | None, str]) -> tuple[Evidence, ...]:
        recorded = [
            make.call(n, reply("hi"), agent=agent, request={"messages": [{"role": "system", "content": prompt}]})
            for n, (agent, prompt) in enumerate(agents)
        ]
        return health_of(build_episode(make.rollout(), make.attempt(), recorded)).missing

    assert calls((None, "You add."), (None, "You add.")) == ()
    assert calls(("writer", "You write."), ("editor", "You edit.")) == ()
    assert calls(("writer", "You write."), (None, "You edit.")) == (Evidence.AGENT_NAMES,)
    assert calls((None, "You write."), (None, "You edit.")) == (Evidence.AGENT_NAMES,)


def test_a_symptom_counts_though_evidence_is_missing_and_a_failed_tool_among_others_is_no_symptom() -> None:
    assert health_of(built(reply("", response_ids=None))).verdict is Verdict.UNHEALTHY
    both = make.choice(tool_calls=["c1", "c2"])
    assert health_of(built(both, reply("42"), results=(FAILED, make.tool_result("2", "c2")))) == RolloutHealth()
