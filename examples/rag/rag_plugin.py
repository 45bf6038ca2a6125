"""The example's plugin: the task source `musique`, and the reward rules `answer_f1` and `searches`.

[tasks.train]                       [rewards.correctness]
source = "musique"                  rule = "answer_f1"
path = "data/train.jsonl.gz"        weight = 0.9
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from musique import read_questions

import agl_core
from agl_core.errors import ConfigError
from agl_core.types import Episode, Task
from agl_rewards import word_f1

ANSWER = re.compile(r"^Answer: *(\S.*)$", re.MULTILINE)
"""The form of an answer. What a reply says before it does not count, nor a reply without it."""


@agl_core.reward_rule
def answer_f1(episode: Episode) -> float:
    """F1 of the words after "Answer:" and the expected answer, in that of its forms that fits best."""
    found = ANSWER.findall(str(episode.result))
    return max(word_f1(found[-1], str(each)) for each in episode.task.metadata["answers"]) if found else 0.0


@agl_core.reward_rule
def searches(episode: Episode) -> float:
    """How many searches an episode made; its weight is what each costs."""
    return float(sum(len(each.tool_results) for each in episode.transitions))


@agl_core.task_source
def musique(*, path: Path, split: str = "train") -> Iterator[Task]:
    """Questions of several hops from a file in MuSiQue's format. The agent is given the question alone."""
    try:
        questions = read_questions(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"path = '{path}' cannot be read: {error}") from error
    for asked in questions:
        metadata = {"answers": list(asked.answers), "hops": len(asked.question_decomposition)}
        yield Task(f"{split}-{asked.id}", {"question": asked.question}, split, metadata)
