"""Overlap of words between what the agent returned and what was expected."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Annotated

from pydantic import Field

import agl_core
from agl_core.types import Episode
from agl_rewards.evaluators import expected_answer, text_of

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@agl_core.reward_rule
def token_f1(
    episode: Episode,
    *,
    field: Annotated[str, Field(description="The key of the task's metadata that holds the answer.")] = "result",
) -> float:
    """The harmonic mean of precision and recall over the words of the answer, 0 … 1 (SQuAD, arXiv 1606.05250).

    `field` names the key of the task's metadata that holds the answer, or a list of answers, of which the best counts.
    Case, punctuation and articles (a, an, the) do not count.

    >>> from agl_core.types import Ending, Mode, Task
    >>> task = Task("1", "Who wrote it?", metadata={"result": ["Jane Austen", "Miss Austen"]})
    >>> token_f1(Episode("r", 0, "g", 0, task, Mode.TRAIN, Ending.FINISHED, (), result="It was Austen."))
    0.4
    """
    expected = expected_answer(episode, field)
    answers = expected if isinstance(expected, list) and expected else [expected]
    return max(word_f1(text_of(episode.result), text_of(answer)) for answer in answers)


def word_f1(found: str, expected: str) -> float:
    """Word F1 of two texts; an empty text is expected only where the expected one is empty.

    Where the expected text has nothing but articles ("A", of several choices) or punctuation, these count.

    >>> word_f1("the cat sat", "A cat sat down!")
    0.8
    >>> word_f1("B", "A"), word_f1("a.", "A"), word_f1("", "The")
    (0.0, 1.0, 0.0)
    """
    for split in (_words, _with_articles, _with_punctuation):
        words, wanted = split(found), split(expected)
        if wanted:
            return 2 * (Counter(words) & Counter(wanted)).total() / (len(words) + len(wanted))
    return float(not found.strip())


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _with_articles(text: str) -> list[str]:
    return text.lower().translate(_NO_PUNCTUATION).split()


def _with_punctuation(text: str) -> list[str]:
    return text.lower().split()
