"""The example's plugin: the task source `musique`, and the reward rules `answer_f1` and `searches`.

[tasks.train]                       [rewards.correctness]
source = "musique"                  rule = "answer_f1"
path = "data/train.jsonl.gz"        weight = 0.9
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from musique import Question, read_questions
from pydantic import BaseModel, ConfigDict, Field

import agl_core
from agl_core.errors import ConfigError
from agl_core.registering import RegisterTaskSource
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


class MusiqueOptions(BaseModel):
    """What `[tasks.…]` may say beside `source = "musique"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(description="A file in MuSiQue's format, relative to the configuration.")
    split: str = Field("train", description="The tasks' split, which their ids begin with.")


@dataclass(frozen=True)
class MusiqueTasks:
    """The questions of a file. The agent is given the question alone."""

    questions: list[Question]
    split: str

    @property
    def size(self) -> int | None:
        return len(self.questions)

    def task(self, index: int) -> Task:
        asked = self.questions[index]
        metadata = {"answers": list(asked.answers), "hops": len(asked.question_decomposition)}
        return Task(f"{self.split}-{asked.id}", {"question": asked.question}, self.split, metadata)


def build(options: MusiqueOptions, folder: Path, seed: int) -> MusiqueTasks:
    """Questions of several hops from a file in MuSiQue's format."""
    try:
        return MusiqueTasks(read_questions(folder / options.path), options.split)
    except (OSError, ValueError) as error:
        raise ConfigError(f"path = '{options.path}' cannot be read: {error}") from error


@agl_core.hookimpl
def register_task_sources(register: RegisterTaskSource) -> None:
    register("musique", build, options=MusiqueOptions)
