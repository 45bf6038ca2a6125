"""Rules that score what the agent returned, or how long its responses were: pure functions of the recorded episode."""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import Field, NonNegativeFloat

import agl_core
from agl_core.errors import ConfigError
from agl_core.types import Episode, Json, TransitionKey

_NUMBER = re.compile(
    r"""
    (?: (?<![\w.)\]]) [-+−] )?                      # a sign, unless it is the operator of "34-17"
    (?: (?:\d{1,3}(?:,\d{3})+(?!\d) | \d+) (?:\.\d+)?   # 1234, 1,234 and 1,234.5
      | \.\d+ )                                     # .5
    (?: [eE][-+]?\d+ )?
    """,
    re.VERBOSE | re.ASCII,
)


AnswerField: TypeAlias = Annotated[str, Field(description="The key of the task's metadata that holds the answer.")]


@agl_core.reward_rule
def exact_match(episode: Episode, *, field: AnswerField = "result") -> float:
    """1 if the agent returned exactly the expected answer; spaces around it do not count.

    Answers that are not text are compared as JSON values.

    >>> from agl_core.types import Ending, Mode, Task
    >>> task = Task("1", "The capital of France?", metadata={"result": "Paris"})
    >>> exact_match(Episode("r", 0, "g", 0, task, Mode.TRAIN, Ending.FINISHED, (), result=" Paris\\n"))
    1.0
    """
    expected, answer = (_stripped(value) for value in (expected_answer(episode, field), episode.result))
    return float(expected == answer and isinstance(expected, bool) == isinstance(answer, bool))


@agl_core.reward_rule
def numeric_match(
    episode: Episode,
    *,
    field: AnswerField = "result",
    tolerance: Annotated[NonNegativeFloat, Field(description="The allowed difference: relative above 1.")] = 1e-6,
) -> float:
    """1 if the last number that the agent returned is the expected one.

    The expected answer is a number, or text that holds one. Thousands may be separated by commas.

    >>> from agl_core.types import Ending, Mode, Task
    >>> task = Task("1", "What is 1200 + 34?", metadata={"result": "1234"})
    >>> numeric_match(Episode("r", 0, "g", 0, task, Mode.TRAIN, Ending.FINISHED, (), result="1200 + 34 is 1,234."))
    1.0
    """
    expected = last_number(expected_answer(episode, field))
    if expected is None:
        raise ConfigError(
            f"Task '{episode.task.id}': its metadata '{field}' is {episode.task.metadata[field]!r}, which holds no "
            f"number; numeric_match needs one. Set `field` to the key that holds the answer, or use exact_match."
        )
    number = last_number(episode.result)
    return float(number is not None and math.isclose(number, expected, rel_tol=tolerance, abs_tol=tolerance))


@agl_core.reward_rule(isolated=True)
def regex_format(
    episode: Episode, *, pattern: Annotated[re.Pattern[str], Field(description="The regular expression.")]
) -> float:
    """1 if a regular expression is found in what the agent returned; anchor it (^, $) to match the whole.

    A run searches in another process, since a search can take for ever, and Python's lock with it.

    >>> from agl_core.types import Ending, Mode, Task
    >>> episode = Episode("r", 0, "g", 0, Task("1", "…"), Mode.TRAIN, Ending.FINISHED, (), result="Answer: 5")
    >>> regex_format(episode, pattern=re.compile(r"^Answer: \\d+$"))
    1.0
    """
    return float(pattern.search(text_of(episode.result)) is not None)


@agl_core.reward_rule
def overlong(
    episode: Episode,
    *,
    limit: Annotated[int, Field(gt=0, description="Tokens of the longest response, such as sampling.max_tokens.")],
    buffer: Annotated[int, Field(gt=0, description="The last tokens before the limit, over which the reward falls.")],
) -> Mapping[TransitionKey, float]:
    """Each response that comes near the token limit loses up to 1: (limit − buffer − tokens) / buffer (DAPO).

    By arXiv 2503.14476, equation 13. The reward belongs to the call; shorter responses have none.

    >>> from agl_core.testing import episodes as make
    >>> long = make.transition(response_ids=list(range(90)))
    >>> [*overlong(make.episode(long), limit=100, buffer=40).values()]
    [-0.75]
    """
    if buffer > limit:
        raise ConfigError(f"[rewards.overlong] buffer is {buffer}, above limit, {limit}: every response would lose.")
    lengths = {t.key: len(t.response_ids) for t in episode.transitions if t.response_ids is not None}
    return {
        key: max(-1.0, (limit - buffer - length) / buffer) for key, length in lengths.items() if length > limit - buffer
    }


def last_number(value: Json) -> float | None:
    """The last number in a text or other JSON value; None if there is none.

    >>> last_number("12 apples at $1,234.50 each")
    1234.5
    >>> last_number("34-17"), last_number("it is -17"), last_number("none")
    (17.0, -17.0, None)
    """
    numbers = _NUMBER.findall(text_of(value))
    return float(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None


def expected_answer(episode: Episode, field: str) -> Json:
    metadata = episode.task.metadata
    if field not in metadata:
        raise ConfigError(
            f"Task '{episode.task.id}' has no metadata '{field}' to compare the agent's answer with; it has "
            f"{', '.join(sorted(metadata)) or 'none'}. Set the reward rule's `field` to the key that holds the answer."
        )
    return metadata[field]


def text_of(value: Json) -> str:
    """The agent's return value as text; None is the empty text."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _stripped(value: Json) -> Json:
    return value.strip() if isinstance(value, str) else value


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@agl_core.reward_rule
def token_f1(episode: Episode, *, field: AnswerField = "result") -> float:
    """The harmonic mean of precision and recall over the words of the answer, 0 … 1 (SQuAD, arXiv 1606.05250).

    The best of a list of answers counts. Case, punctuation and articles (a, an, the) do not count.

    >>> from agl_core.types import Ending, Mode, Task
    >>> task = Task("1", "Who wrote it?", metadata={"result": ["Jane Austen", "Miss Austen"]})
    >>> token_f1(Episode("r", 0, "g", 0, task, Mode.TRAIN, Ending.FINISHED, (), result="It was Austen."))
    0.4
    """
    expected = expected_answer(episode, field)
    answers = expected if isinstance(expected, list) and expected else [expected]
    return max(word_f1(text_of(episode.result), text_of(answer)) for answer in answers)


def word_f1(text: str, expected: str) -> float:
    """Word F1 of two texts; an empty text is expected only where the expected one is empty.

    Articles and punctuation count if the expected text has nothing else ("A", of several choices).

    >>> word_f1("the cat sat", "A cat sat down!")
    0.8
    >>> word_f1("B", "A"), word_f1("a.", "A"), word_f1("", "The")
    (0.0, 1.0, 0.0)
    """
    for words, wanted in zip(_words(text), _words(expected), strict=True):
        if wanted:
            return 2 * (Counter(words) & Counter(wanted)).total() / (len(words) + len(wanted))
    return float(not text.strip())


def _words(text: str) -> list[list[str]]:
    """The words without articles and punctuation; with articles; with both."""
    lower = text.lower()
    plain = lower.translate(_NO_PUNCTUATION)
    return [_ARTICLES.sub(" ", plain).split(), plain.split(), lower.split()]
