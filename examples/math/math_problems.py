"""Problems of two to four steps in the Calc-X format: a question and its result.

A problem is a sequence of operators, numbers for them, and a phrasing: a story, a nested expression, or a chain of
definitions. The result of each step is needed for the next one. Training never meets three parts of that space, each
of which is a held-out set: some numbers, some sequences of operators, some phrasings.

    >>> problem(Split.TRAIN, seed=0, index=7) == problem(Split.TRAIN, seed=0, index=7)
    True
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

NAMES = ("Tom", "Ana", "Li", "Sam", "Eva", "Max", "Zoe", "Raj", "Mia", "Ben")
THINGS = ("apples", "books", "coins", "cards", "pens", "eggs", "shells", "stamps")
LETTERS = ("abcd", "pqrs", "wxyz")
OPERATORS = "+-*/"
LARGEST = 999
HELD_OUT_NUMBERS = range(13, 99, 9)
STEPS = {2: 0.55, 3: 0.35, 4: 0.1}
"""How often a problem has so many steps."""
TRIES = 100_000
"""Hardly any numbers fit some sequences of operators: after so many, another sequence is drawn."""


class Split(StrEnum):
    """Which problems may be drawn."""

    TRAIN = "train"
    EVAL_NUMBERS = "eval_numbers"
    """Problems that begin with a number that training's questions never contain."""
    EVAL_STEPS = "eval_steps"
    """Sequences of operators that training never sees."""
    EVAL_PHRASES = "eval_phrases"
    """Sentences that training never sees."""


class Kind(StrEnum):
    """How a problem is asked."""

    STORY = "story"
    NESTED = "nested"
    CHAIN = "chain"


@dataclass(frozen=True)
class Step:
    """One operation with a number; the other operand is the result so far."""

    operator: str
    number: int
    result_first: bool
    """True if the result so far is the left operand."""

    def written(self, result: str | int) -> str:
        """The operation, for instance "17*3"."""
        left, right = (result, self.number) if self.result_first else (self.number, result)
        return f"{left}{self.operator}{right}"

    def value(self, result: int) -> int | None:
        """The result; None if it is no whole number."""
        left, right = (result, self.number) if self.result_first else (self.number, result)
        if self.operator == "/":
            return left // right if right and left % right == 0 else None
        return {"+": left + right, "-": left - right, "*": left * right}[self.operator]


@dataclass(frozen=True)
class Problem:
    question: str
    last_as_written: str
    """The last operation as the question has it: all of the expression, with a letter, or with the first number."""
    start: int
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    """The result of each step; the last one is the answer."""

    @property
    def result(self) -> str:
        """The right answer, as digits."""
        return str(self.results[-1])

    @property
    def operators(self) -> str:
        """For instance "+*-"."""
        return "".join(step.operator for step in self.steps)

    @property
    def calls(self) -> list[str]:
        """The calculator's inputs, one after the other."""
        return [step.written(so_far) for step, so_far in zip(self.steps, (self.start, *self.results), strict=False)]


def _sentences(leads: Sequence[str], cores: Sequence[str], held_out: bool) -> tuple[str, ...]:
    """Every core after every lead, but for those that are held out, or only those; each core is on both sides."""
    return tuple(
        lead + core if lead else core[0].upper() + core[1:]
        for place, lead in enumerate(leads)
        for number, core in enumerate(cores, 1)
        if ((place + number) % len(leads) == 0) is held_out
    )


class Phrasing:
    """Sentences of which questions are made: those that training may see, or the others."""

    def __init__(self, held_out: bool) -> None:
        of_questions = ("", "Now ", "So ", "And ")
        of_statements = ("", "Now ", "Then ", "Later ")

        def asking(*cores: str) -> tuple[str, ...]:
            return _sentences(of_questions, cores, held_out)

        def stating(*cores: str) -> tuple[str, ...]:
            return _sentences(of_statements, cores, held_out)

        self.begins = stating("{name} has {a} {things}.", "there are {a} {things}.", "{name} finds {a} {things}.")
        self.goes_on = {
            "+": stating("{name} buys {b} more.", "{b} more come.", "{name} finds {b} more."),
            "-": stating("{name} loses {b}.", "{b} go away.", "{name} sells {b}."),
            "*": stating("there are {b} times as many.", "the number grows {b} times."),
            "/": stating("{name} keeps one in {b}.", "they are shared by {b}."),
        }
        self.ends = asking("how many {things} are there?", "how many are left?", "what is the number of {things}?")
        self.nested = asking("what is {e}?", "compute {e}.", "give me {e}.")
        self.defines = stating("let {x} = {e}.", "{x} is {e}.", "{x} = {e}.")
        self.asks = asking("what is {x}?", "compute {x}.", "give me {x}.")


TRAINED, HELD_OUT = Phrasing(held_out=False), Phrasing(held_out=True)


def operators_are_held_out(operators: str) -> bool:
    """True if training must never see this sequence of operators."""
    return zlib.crc32(f"sequence {operators}".encode()) % 6 == 0


def problem(split: Split, seed: int, index: int, lengths: Mapping[int, float] = STEPS) -> Problem:
    """The problem at this index; the same for the same arguments, always. Indices have no end.

    `lengths` says how often a problem has so many steps.
    """
    rng = random.Random(f"{split}/{seed}/{index}")
    kind = rng.choice(list(Kind))
    [length] = rng.choices(list(lengths), list(lengths.values()))
    found = None
    while found is None:
        operators = _operators(rng, length)
        if operators_are_held_out(operators) is (split is Split.EVAL_STEPS):
            tried = (_numbers(rng, operators, kind) for _ in range(TRIES))
            found = next((numbers for numbers in tried if _fits(split, *numbers)), None)
    start, steps, results = found
    phrasing = HELD_OUT if split is Split.EVAL_PHRASES else TRAINED
    question, written = _asked(rng, phrasing, kind, start, steps)
    return Problem(question, written, start, steps, results)


def _operators(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(OPERATORS, k=length))


def _numbers(rng: random.Random, operators: str, kind: Kind) -> tuple[int, tuple[Step, ...], tuple[int, ...]]:
    start = result = rng.randint(2, 99)
    steps, results = [], []
    for place, sign in enumerate(operators):
        # Only a definition may name the number first, once there is a result to name.
        result_first = kind is not Kind.CHAIN or place == 0 or sign == "/" or rng.random() < 0.75
        step = Step(sign, rng.randint(2, 9) if sign in "*/" else rng.randint(2, 99), result_first)
        value = step.value(result)
        if value is None or not 0 < value <= LARGEST:
            return start, (), ()
        result = value
        steps.append(step)
        results.append(result)
    return start, tuple(steps), tuple(results)


def _fits(split: Split, start: int, steps: tuple[Step, ...], results: tuple[int, ...]) -> bool:
    """True if the split may have these numbers, and stopping early, or a guess of 42, is never right."""
    if not steps or results[-1] in (42, start, *results[:-1], *(step.number for step in steps)):
        return False
    others = any(step.number in HELD_OUT_NUMBERS for step in steps)
    return not others and (start in HELD_OUT_NUMBERS) is (split is Split.EVAL_NUMBERS)


def _asked(rng: random.Random, said: Phrasing, kind: Kind, start: int, steps: tuple[Step, ...]) -> tuple[str, str]:
    """The question, and its last operation as the question has it."""
    if kind is Kind.NESTED:
        expression = steps[0].written(start)
        for step in steps[1:]:
            expression = step.written(f"({expression})")
        return rng.choice(said.nested).format(e=expression), expression
    if kind is Kind.CHAIN:
        letters = rng.choice(LETTERS)[: len(steps)]
        written = [step.written(known) for step, known in zip(steps, (start, *letters), strict=False)]
        sentences = [
            rng.choice(said.defines).format(x=letter, e=each) for letter, each in zip(letters, written, strict=True)
        ]
        return " ".join([*sentences, rng.choice(said.asks).format(x=letters[-1])]), written[-1]
    words = {"name": rng.choice(NAMES), "things": rng.choice(THINGS)}
    sentences = [rng.choice(said.begins).format(a=start, **words)]
    sentences += [rng.choice(said.goes_on[step.operator]).format(b=step.number, **words) for step in steps]
    return " ".join([*sentences, rng.choice(said.ends).format(**words)]), steps[-1].written(start)
