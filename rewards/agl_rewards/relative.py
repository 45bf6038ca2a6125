"""A language model that compares the rollouts of a task, as ART's RULER does.

A judge's scale differs from call to call. Rollouts of a group need one scale, and get it from one request.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from pydantic import Field

from agl_core.capture.status import message_text
from agl_core.learning.tool_results import function_of, tool_calls_of
from agl_core.protocols import GroupRewardRule
from agl_core.types import Episode
from agl_rewards.evaluators import text_of
from agl_rewards.judge import SCALE, JudgeError, JudgeModel, JudgeOptions, Question

Said: TypeAlias = tuple[str, str]
"""A speaker and a text: a message, a tool call, or the agent's result."""

_SHORTEST = 200
"""Characters that a text is not cut below; if there are too many texts, the middle ones go instead."""
MAX_CHARACTERS = 20_000
"""Characters of a rollout's messages that the judge sees."""


class RelativeJudgeOptions(JudgeOptions):
    """Settings of `relative_judge`."""

    rubric: str = Field(
        "The task is done: correctly, completely and without detours.",
        description="The criteria of a good rollout, in words.",
    )
    ranking: bool = Field(
        False, description="Ask for ranks, not scores: the reward is the share of the other rollouts that are worse."
    )


def relative_judge(options: RelativeJudgeOptions, _: object) -> GroupRewardRule:
    """A language model compares the rollouts of a task, in one request: 0 … 1 for each.

        [rewards.relative_judge]
        base_url = "http://localhost:8000/v1"
        model = "Qwen/Qwen2.5-7B-Instruct"

    The judge sees the task, what the rollouts have in common, and what each said and did after that, under random
    labels in random order. Equal rollouts are shown once.
    The reward is the score; or, of a ranking, the share of the other rollouts that are worse, where a tie counts half.
    A single rollout, as evaluations have it, is scored by the rubric alone, also if others are ranked.

    A rollout from which the judge twice copies a verdict is the worst, and the others are compared without it. Any
    other JudgeError drops the group.
    """
    model = JudgeModel(options)

    async def compare(episodes: Sequence[Episode]) -> list[float]:
        transcripts = [_transcript(episode) for episode in episodes]
        distinct = sorted(set(transcripts))
        is_ranked = options.ranking and len(distinct) > 1
        numbers = dict.fromkeys(distinct, float(len(distinct)) if is_ranked else 0.0)
        while distinct:
            ask = partial(_question, options, episodes[0], distinct, is_ranked)
            try:
                numbers |= zip(distinct, await model.numbers(len(distinct), ask), strict=True)
                break
            except JudgeError as error:
                honest = [transcript for transcript in distinct if not _dictates(transcript, error)]
                if honest == distinct:
                    raise
                distinct = honest
        values = [numbers[transcript] for transcript in transcripts]
        return shares_beaten(values) if is_ranked else [value / SCALE for value in values]

    return GroupRewardRule(compare)


def shares_beaten(ranks: Sequence[float]) -> list[float]:
    """For each rank the share of the others that are worse; 1 is the best rank, a tie counts half.

    >>> shares_beaten([1, 3, 2]), shares_beaten([1, 2, 2]), shares_beaten([5, 5])
    ([1.0, 0.0, 0.5], [1.0, 0.25, 0.25], [0.5, 0.5])
    """
    beaten = [sum((other > rank) + (other == rank) / 2 for other in ranks) - 0.5 for rank in ranks]
    return [count / (len(ranks) - 1) for count in beaten]


def _question(
    options: RelativeJudgeOptions,
    episode: Episode,
    transcripts: Sequence[tuple[Said, ...]],
    is_ranked: bool,
    labels: Sequence[str],
) -> Question:
    """The comparison of these transcripts of an episode's task, all different, labelled in their order."""
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*transcripts, strict=False))
    shared = [said for said, *_ in alike] if len(transcripts) > 1 else []
    own = [_shortened(transcript[len(shared) :]) for transcript in transcripts]
    return Question(
        task=(
            "You compare rollouts of an assistant, which tried one task several times, by a rubric. The material has "
            "the task, the expected answer where there is one, the messages that all rollouts begin with (`shared`), "
            "and what came after them in each rollout, under its label. The order of the rollouts means nothing."
        ),
        # Labels are random, so rollouts in the order of their labels are in random order.
        material={
            **options.material(episode),
            "shared": _shortened(shared),
            "rollouts": dict(sorted(zip(labels, own, strict=True))),
        },
        labels=labels,
        ranked=is_ranked,
    )


def _transcript(episode: Episode) -> tuple[Said, ...]:
    """A rollout's messages and tool calls, each once after the same messages, and the agent's result."""
    transcript: list[Said] = []
    conversations: set[int] = set()
    for transition in episode.transitions:
        conversation = 0
        for message in (*transition.messages, transition.response):
            said = tuple(_said(message))
            conversation = hash((conversation, said))
            if conversation not in conversations:
                conversations.add(conversation)
                transcript += said
    return (*transcript, ("returned", text_of(episode.result)))


def _dictates(transcript: Sequence[Said], refused: JudgeError) -> bool:
    """True if the judge copied its refused verdict from a text of the rollout, not from the task."""
    return any(refused.quotes(text) for speaker, text in transcript if speaker not in ("system", "developer", "user"))


def _said(message: Mapping[str, Any]) -> Iterator[Said]:
    role = str(message.get("role"))
    if text := message_text(message.get("content")):
        yield role, text
    for tool_call in tool_calls_of(message):
        name, arguments = function_of(tool_call)
        yield f"{role} calls", f"{name} {text_of(arguments)}"


def _shortened(transcript: Sequence[Said]) -> list[list[str]]:
    """A transcript of about `MAX_CHARACTERS` at most: long texts, and long transcripts, lose their middle."""
    side = MAX_CHARACTERS // _SHORTEST // 2
    if (cut := len(transcript) - 2 * side) > 0:
        transcript = (*transcript[:side], ("cut", f"… {cut} messages …"), *transcript[-side:])
    limit = MAX_CHARACTERS
    while sum(min(len(text), limit) for _, text in transcript) > MAX_CHARACTERS:
        limit = limit * 9 // 10
    return [[speaker, _without_middle(text, limit)] for speaker, text in transcript]


def _without_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} [… {len(text) - limit} characters cut …] {text[len(text) - limit // 2 :]}"
