"""Three small games of eight to ten calls, each a Markov decision process with known chances.

At each call the player sees a prompt of two or three words, and replies with one letter. Because the chances are known,
and the habits of the policy before training too (`shares`), so is what every call is worth: `advantage`.

- `additive`: ten words; for each of them one letter is right, and earns a tenth by itself.
- `decisive`: the first and the third call decide; eight calls change nothing, and the reward comes at the end.
- `recoverable`: four things are to be fetched in eight calls by the right tool, which fails one time in four and can
  be asked again; the reward is 1 if all four are there in the end.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

LETTERS = "abcd"
WORDS = ("ant", "bee", "cat", "dog", "elk", "fox", "hen", "owl", "pig", "yak")
SKIP = "d"
"""In `recoverable` the other letters are tools; this one goes on without the thing."""
FAILS = 0.25
DECISIONS = {0: "key", 2: "door"}


class Bed(StrEnum):
    ADDITIVE = "additive"
    DECISIVE = "decisive"
    RECOVERABLE = "recoverable"


CALLS = {Bed.ADDITIVE: 10, Bed.DECISIVE: 10, Bed.RECOVERABLE: 8}
"""How long a game is at most."""
MANY = {Bed.ADDITIVE: 10, Bed.DECISIVE: 1, Bed.RECOVERABLE: 4}
"""How many words a task has."""


@dataclass(frozen=True)
class State:
    """Where a game is before a call."""

    bed: Bed
    words: tuple[str, ...]
    turn: int = 0
    done: str = ""
    """`decisive`: the letters of the decisions so far; `recoverable`: + or - for each thing that was fetched or not."""
    failed: bool = False
    """`recoverable`: whether the last tool failed."""

    @property
    def topic(self) -> str:
        """The request: with the word, it decides which letter is right."""
        match self.bed:
            case Bed.ADDITIVE:
                return "add"
            case Bed.DECISIVE:
                return DECISIONS.get(self.turn, "walk")
            case Bed.RECOVERABLE:
                return "get"

    @property
    def word(self) -> str:
        place = {Bed.ADDITIVE: self.turn, Bed.DECISIVE: 0, Bed.RECOVERABLE: len(self.done)}[self.bed]
        return self.words[place]

    @property
    def prompt(self) -> str:
        """The model's view: all that the right reply depends on."""
        match self.bed:
            case Bed.ADDITIVE:
                return f"{self.topic} {self.word}"
            case Bed.DECISIVE:
                return f"{self.topic} {self.word} {self.turn}{self.done}"
            case Bed.RECOVERABLE:
                return f"{'retry' if self.failed else 'get'} {self.word} {self.turn}"

    @property
    def right(self) -> str | None:
        """The right letter; None if every letter is as good."""
        return None if self.topic == "walk" else right(self.topic, self.word)


@dataclass(frozen=True)
class Outcome:
    """A possible outcome of a reply."""

    chance: float
    reward: float
    after: State | None
    """None: the game is over."""
    tool: bool | None = None
    """True if the tool succeeded; None if none was asked."""


def letter(content: str | None) -> str:
    return (content or "").strip()


def right(topic: str, word: str) -> str:
    letters = LETTERS.replace(SKIP, "") if topic == "get" else LETTERS
    return letters[zlib.crc32(f"{topic} {word}".encode()) % len(letters)]


@cache
def outcomes(state: State, letter: str) -> tuple[Outcome, ...]:
    """The outcomes of a letter, with chances that add up to 1. What is no letter of the game is a wrong one."""
    is_right = letter == state.right
    match state.bed:
        case Bed.ADDITIVE:
            return (Outcome(1.0, is_right / CALLS[state.bed], _next(state)),)
        case Bed.DECISIVE:
            done = state.done + (letter if letter in LETTERS else "-") if state.turn in DECISIONS else state.done
            after = _next(state, done=done)
            return (Outcome(1.0, float(after is None and done == _way(state.word)), after),)
        case Bed.RECOVERABLE:
            if letter == SKIP:
                return (_fetched(state, "-", None),)
            again = Outcome(1.0, 0.0, _next(state, failed=True), False)
            if not is_right:
                return (again,)
            return (replace(again, chance=FAILS), replace(_fetched(state, "+", True), chance=1 - FAILS))


def _way(word: str) -> str:
    return "".join(right(topic, word) for topic in DECISIONS.values())


def _next(state: State, done: str = "", failed: bool = False) -> State | None:
    turn = state.turn + 1
    if turn == CALLS[state.bed]:
        return None
    return replace(state, turn=turn, done=done or state.done, failed=failed)


def _fetched(state: State, mark: str, tool: bool | None) -> Outcome:
    done = state.done + mark
    if len(done) < MANY[state.bed]:
        return Outcome(1.0, 0.0, _next(state, done=done), tool)
    return Outcome(1.0, float("-" not in done), None, tool)


@cache
def shares(state: State) -> Mapping[str, float]:
    """How often the policy before training gives each letter: it mostly gives one that is wrong."""
    if state.right is None:
        return dict.fromkeys(LETTERS, 1 / len(LETTERS))
    if state.bed is Bed.RECOVERABLE:
        skip, chosen = (0.55, 0.3) if state.failed else (0.1, 0.5)
        other = (1 - skip - chosen) / 2
        return {letter: {state.right: chosen, SKIP: skip}.get(letter, other) for letter in LETTERS}
    favourite = LETTERS[(LETTERS.index(state.right) + 1) % len(LETTERS)]
    return {letter: {state.right: 0.3, favourite: 0.5}.get(letter, 0.1) for letter in LETTERS}


@cache
def value(state: State | None) -> float:
    """The earnings still to come on average, by these habits."""
    if state is None:
        return 0.0
    return sum(share * worth(state, letter) for letter, share in shares(state).items())


def worth(state: State, letter: str) -> float:
    """The average earnings after this letter."""
    return sum(each.chance * (each.reward + value(each.after)) for each in outcomes(state, letter))


def advantage(state: State, letter: str) -> float:
    """By how much this letter is better than the policy's habit: the true credit of the call."""
    return worth(state, letter) - value(state)
