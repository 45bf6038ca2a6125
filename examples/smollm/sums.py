"""The example's task source, as a plugin: `[tasks.train] source = "sums"`, `split = "train"`.

The questions are those of reasoning-gym's `chain_sum`, word for word, with terms of one digit.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

import agl_core
from agl_core import kinds
from agl_core.kinds import Register
from agl_core.types import Task

QUESTION = "State the final answer to the following arithmetic problem: {} ="
HELD_OUT_PER_LENGTH = 50
HELD_OUT_SEED = 0


class Split(StrEnum):
    """Which questions: training never meets one of `eval`."""

    TRAIN = "train"
    EVAL = "eval"


class SumOptions(BaseModel):
    """What `[tasks.…]` may say beside `source = "sums"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    split: Split = Field(description="Which questions to draw.")
    least_terms: int = Field(2, ge=2, le=3, description="Terms of the shortest sums.")
    most_terms: int = Field(3, ge=2, le=3, description="Terms of the longest sums.")


Sum = tuple[int | str, ...]
"""Terms and signs in turn: (4, '+', 3)."""


def every_sum(terms: int) -> list[Sum]:
    """All sums of this many terms from 0 to 9."""
    signed = itertools.product(range(10), *itertools.repeat(range(-10, 10), terms - 1))
    return [
        (first, *itertools.chain.from_iterable(("+", n) if n >= 0 else ("-", ~n) for n in rest))
        for first, *rest in signed
    ]


def held_out(terms: int) -> list[Sum]:
    """The sums of this many terms that training never meets, in a fixed random order."""
    return random.Random(HELD_OUT_SEED).sample(every_sum(terms), HELD_OUT_PER_LENGTH)


def result(terms: Sum) -> int:
    """What a sum comes to."""
    total = 0
    for sign, number in zip(("+", *terms[1::2]), terms[::2], strict=True):
        total += int(number) if sign == "+" else -int(number)
    return total


@dataclass(frozen=True)
class SumTasks:
    """Sums of one split, of each length alike."""

    split: Split
    sums: tuple[tuple[Sum, ...], ...]
    """By length: those of `eval`, or those to draw from."""
    seed: int

    @property
    def size(self) -> int | None:
        """Training's have no end."""
        return None if self.split is Split.TRAIN else sum(map(len, self.sums))

    def task(self, index: int) -> Task:
        """The sum at this index; its result is metadata, which the agent does not see."""
        if self.split is Split.TRAIN:
            rng = random.Random(f"{self.seed} {index}")
            drawn = rng.choice(rng.choice(self.sums))
        else:
            place, length = divmod(index, len(self.sums))
            drawn = self.sums[length][place]
        return Task(
            id=f"{self.split}-{index}",
            input={"question": QUESTION.format(" ".join(map(str, drawn)))},
            split=self.split,
            metadata={"result": str(result(drawn)), "terms": len(drawn[::2])},
        )


def build(options: SumOptions, folder: Path, seed: int) -> SumTasks:
    """Sums with results, as they are asked for."""
    kept = []
    for terms in range(options.least_terms, options.most_terms + 1):
        apart = held_out(terms)
        others = set(apart)
        kept.append(
            tuple(apart)
            if options.split is Split.EVAL
            else tuple(each for each in every_sum(terms) if each not in others)
        )
    return SumTasks(options.split, tuple(kept), seed)


@agl_core.hookimpl
def register_components(register: Register) -> None:
    register(kinds.TASK_SOURCE, "sums", build, options=SumOptions)
