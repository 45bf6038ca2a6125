"""Arithmetic word problems in the Calc-X format: a question and its result.

A problem is made from a sentence template, a name, a thing and a pair of numbers. Two parts of that space are
held out, so that training can never meet them: one pair of numbers in eight (of any template), and two templates
of each operator.

    >>> problem(Split.TRAIN, seed=0, index=7) == problem(Split.TRAIN, seed=0, index=7)
    True
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from enum import StrEnum

NAMES = ("Tom", "Ana", "Li", "Sam", "Eva", "Max", "Zoe", "Raj", "Mia", "Ben")
THINGS = ("apples", "books", "coins", "cards", "pens", "eggs", "shells", "stamps")


class Split(StrEnum):
    """Which problems may be drawn."""

    TRAIN = "train"
    EVAL = "eval"
    """Training's templates with number pairs that training never sees."""
    EVAL_TEMPLATES = "eval_templates"
    """Training's number pairs in templates that training never sees."""


@dataclass(frozen=True)
class Problem:
    question: str
    result: str
    """The right answer, as digits."""
    template: str
    a: int
    operator: str
    """One of + - * /."""
    b: int

    @property
    def expression(self) -> str:
        """The calculator's input, for instance "12*7"."""
        return f"{self.a}{self.operator}{self.b}"


TRAINED_TEMPLATES: dict[str, tuple[str, ...]] = {
    "+": (
        "{name} has {a} {things} and buys {b} more. How many {things} are there?",
        "{name} has {a} {things} and finds {b} more. How many {things} does {name} have now?",
        "There are {a} {things} on the table. {name} brings {b} more. How many {things} are there in total?",
        "{name} has {a} red {things} and {b} blue {things}. How many {things} in total?",
        "What is {a} plus {b}?",
    ),
    "-": (
        "{name} has {a} {things} and gives away {b}. How many {things} are left?",
        "{name} has {a} {things} and loses {b} of them. How many {things} does {name} have left?",
        "There are {a} {things} in a box. {name} takes {b} of them. How many {things} are left in the box?",
        "{name} had {a} {things} and sold {b}. How many {things} remain?",
        "What is {a} minus {b}?",
    ),
    "*": (
        "{name} has {a} boxes with {b} {things} each. How many {things} in all?",
        "There are {a} bags. Each bag holds {b} {things}. How many {things} in all?",
        "{name} makes {a} rows of {b} {things} each. How many {things} does {name} need?",
        "Each of {a} children has {b} {things}. How many {things} do they have in all?",
        "What is {a} times {b}?",
    ),
    "/": (
        "{name} shares {a} {things} equally among {b} friends. How many {things} does each friend get?",
        "{name} puts {a} {things} equally into {b} bags. How many {things} are in each bag?",
        "{a} {things} are split equally between {b} children. How many {things} per child?",
        "{name} packs {a} {things} into boxes of {b}. How many boxes does {name} fill?",
        "What is {a} divided by {b}?",
    ),
}

HELD_OUT_TEMPLATES: dict[str, tuple[str, ...]] = {
    "+": (
        "{name} finds {a} {things} and then buys {b} more. How many {things} does {name} have in total?",
        "There are {a} {things} in a box and {b} more on the table. How many {things} are there?",
    ),
    "-": (
        "{name} had {a} {things} and gives {b} of them away. How many {things} remain?",
        "There are {a} {things} on the table. {name} sold {b} of them. How many {things} are left?",
    ),
    "*": (
        "There are {a} boxes. Each box holds {b} {things}. How many {things} does {name} have in all?",
        "{name} has {a} rows with {b} {things} each. How many {things} are there in all?",
    ),
    "/": (
        "{name} splits {a} {things} equally among {b} children. How many {things} does each child get?",
        "{a} {things} are shared equally between {b} friends. How many {things} per friend?",
    ),
}

OPERATORS = tuple(TRAINED_TEMPLATES)
_HELD_OUT_ONE_IN = 8
_RESULTS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}


def pair_is_held_out(a: int, operator: str, b: int) -> bool:
    """True if training must never see these numbers with this operator.

    3 + 5 and 5 + 3 are one pair, and so are 3 * 5 and 5 * 3.
    """
    first, second = sorted((a, b)) if operator in "+*" else (a, b)
    return zlib.crc32(f"{first}{operator}{second}".encode()) % _HELD_OUT_ONE_IN == 0


def problem(split: Split, seed: int, index: int) -> Problem:
    """The problem at this index; the same for the same three arguments, always. Indices have no end."""
    rng = random.Random(f"{split}/{seed}/{index}")
    operator = rng.choice(OPERATORS)
    templates = HELD_OUT_TEMPLATES if split is Split.EVAL_TEMPLATES else TRAINED_TEMPLATES
    template = rng.choice(templates[operator])
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    a, b = _numbers(rng, operator)
    while pair_is_held_out(a, operator, b) is not (split is Split.EVAL):
        a, b = _numbers(rng, operator)
    question = template.format(name=name, things=things, a=a, b=b)
    return Problem(question, str(_RESULTS[operator](a, b)), template, a, operator, b)


def _numbers(rng: random.Random, operator: str) -> tuple[int, int]:
    """Two numbers whose result is a positive integer."""
    if operator == "-":
        # At most half is taken away: else a % b, the warm-up's wrong expression, would often equal a - b.
        b = rng.randint(2, 49)
        return rng.randint(2 * b, 99), b
    if operator == "/":
        b = rng.randint(2, 12)
        return b * rng.randint(2, 40), b
    if operator == "*":
        return rng.randint(2, 99), rng.randint(2, 30)
    return rng.randint(2, 99), rng.randint(2, 99)
