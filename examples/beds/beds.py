"""Two small games, each a Markov decision process with known chances: what every call is worth can be computed.

At each call the player sees a prompt of three words, and replies with one letter. No prompt says which call it is, so
that states repeat. The first word is the player's level: before training, the habits of a higher level are better
(`habits`), so that it chooses how often the first rollouts succeed.

- `errand`: things are to be fetched, one after the other, by the right tool of three for each. A tool that is right may
  fail, and can be asked again; a fourth letter goes on without the thing, a fifth one rings a bell. The reward is 1 if
  all things are there in the end.
- `walk`: a corridor of rooms. The key is to be taken in one of them, and the door opened in another. Walking always
  succeeds, wherever it leads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

LETTERS = "abcde"
WORDS = ("ant", "bee", "cat", "dog", "elk", "fox", "hen", "owl", "pig", "yak")
LEVELS: Mapping[str, float] = {
    "mole": -0.8,
    "crab": -0.7,
    "toad": -0.6,
    "duck": -0.5,
    "goat": -0.4,
    "mule": -0.3,
    "lamb": -0.2,
    "swan": -0.1,
    "frog": 0.0,
    "hare": 0.08,
    "lynx": 0.16,
    "bear": 0.24,
    "wolf": 0.32,
    "hawk": 0.4,
    "lion": 0.5,
}
"""How good each level's habits are before training, from −1 (never right) to 1."""
TOOLS, SKIP, BELL = ("a", "b", "c"), "d", "e"
"""In `errand`: one of them fetches a thing; goes on without it; does nothing."""
ROOMS = ("attic", "bath", "cellar", "den", "hall", "kitchen", "loft")
"""In a row."""
KEY, DOOR = 0, len(ROOMS) - 1
LEFT, RIGHT, TAKE, OPEN = "abcd"


class Bed(StrEnum):
    ERRAND = "errand"
    WALK = "walk"


@dataclass(frozen=True)
class Game:
    """A task: which game, and how it is played."""

    bed: Bed
    level: str
    words: tuple[str, ...] = ()
    """`errand`: the things."""
    calls: int = 20
    flaky: float = 0.25
    """`errand`: how often the right tool fails."""
    wrong_ok: float = 0.0
    """`errand`: how often a wrong tool reports success all the same."""
    farm: bool = False
    """`errand`: the bell is a tool, which always succeeds."""
    luck: float = 0.0
    """How often a coin decides on the reward."""
    start: int = 3
    """`walk`: the first room."""


@dataclass(frozen=True)
class State:
    """The place of a game before a call."""

    game: Game
    turn: int = 0
    done: int = 0
    """`errand`: things that were fetched, or left behind; `walk`: 1 with the key."""
    complete: bool = True
    """`errand`: nothing was left behind."""
    failed: bool = False
    """`errand`: whether the last tool failed."""
    room: int = 0

    @classmethod
    def first(cls, game: Game) -> State:
        return cls(game, room=game.start if game.bed is Bed.WALK else 0)

    @property
    def prompt(self) -> str:
        if self.game.bed is Bed.WALK:
            return f"{self.game.level} {'open' if self.done else 'take'} {ROOMS[self.room]}"
        return f"{self.game.level} {'retry' if self.failed else 'get'} {self.game.words[self.done]}"


@dataclass(frozen=True)
class Outcome:
    """A possible outcome of a reply."""

    chance: float
    reward: float = 0.0
    after: State | None = None
    """None: the game is over."""
    tool: str | None = None
    """The tool that was asked."""
    works: bool = True


Policy: TypeAlias = Callable[[State], Mapping[str, float]]
"""How often each letter is replied."""


def letter(content: str | None) -> str:
    return (content or "").strip()


def right(state: State) -> str:
    """The letter that leads on."""
    if state.game.bed is Bed.ERRAND:
        return LETTERS[zlib.crc32(state.game.words[state.done].encode()) % 3]
    goal, act = (DOOR, OPEN) if state.done else (KEY, TAKE)
    return act if state.room == goal else LEFT if goal < state.room else RIGHT


def outcomes(state: State, letter: str) -> tuple[Outcome, ...]:
    """The outcomes of a letter, with chances that add up to 1. What is no letter of the game is a lost call."""
    parts = _walk(state, letter) if state.game.bed is Bed.WALK else _errand(state, letter)
    return tuple(part for part in parts if part.chance)


def _errand(state: State, letter: str) -> list[Outcome]:
    game = state.game
    if letter == SKIP:
        return _done(state, Outcome(1.0), complete=False)
    if letter == right(state):
        missed = _next(state, Outcome(game.flaky, tool=letter, works=False), failed=True)
        return [*missed, *_done(state, Outcome(1 - game.flaky, tool=letter))]
    if letter == BELL and game.farm:
        return _next(state, Outcome(1.0, tool=letter), failed=state.failed)
    if letter in TOOLS:
        denied = _next(state, Outcome(1 - game.wrong_ok, tool=letter, works=False), failed=True)
        return [*denied, *_next(state, Outcome(game.wrong_ok, tool=letter), failed=False)]
    return _next(state, Outcome(1.0), failed=state.failed)


def _done(state: State, outcome: Outcome, complete: bool = True) -> list[Outcome]:
    complete = state.complete and complete
    if state.done + 1 == len(state.game.words):
        return _end(state.game, outcome, complete)
    return _next(state, outcome, done=state.done + 1, complete=complete, failed=False)


def _walk(state: State, letter: str) -> list[Outcome]:
    if letter in (LEFT, RIGHT):
        room = min(max(state.room + (1 if letter == RIGHT else -1), 0), len(ROOMS) - 1)
        return _next(state, Outcome(1.0, tool="walk"), room=room)
    if letter == TAKE:
        has_key = state.room == KEY
        return _next(state, Outcome(1.0, tool="take", works=has_key), done=int(has_key or state.done))
    if letter == OPEN and state.done and state.room == DOOR:
        return _end(state.game, Outcome(1.0, tool="open"), won=True)
    return _next(state, Outcome(1.0, tool="open" if letter == OPEN else None, works=False))


def _next(state: State, outcome: Outcome, **changes: object) -> list[Outcome]:
    if state.turn + 1 == state.game.calls:
        return _end(state.game, outcome, won=False)
    return [replace(outcome, after=replace(state, turn=state.turn + 1, **changes))]  # type: ignore[arg-type]


def _end(game: Game, outcome: Outcome, won: bool) -> list[Outcome]:
    share = (1 - game.luck) * won + game.luck / 2
    return [
        replace(outcome, chance=outcome.chance * share, reward=1.0),
        replace(outcome, chance=outcome.chance * (1 - share)),
    ]


def habits(state: State) -> Mapping[str, float]:
    """How often the policy before training gives each letter."""
    skip, chosen = (0.0, 0.3) if state.game.bed is Bed.WALK else (0.55, 0.3) if state.failed else (0.1, 0.5)
    skill = LEVELS[state.game.level]
    chosen += skill * (chosen if skill < 0 else 1 - chosen)
    skip = min(skip * (1 - skill), 1 - chosen)
    shares = {right(state): chosen, **({SKIP: skip} if skip else {})}
    rest = (1 - chosen - skip) / (len(LETTERS) - len(shares))
    return {letter: shares.get(letter, rest) for letter in LETTERS}


class Worth:
    """The worth of states and letters while a policy plays."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._values: dict[State, float] = {}

    def value(self, state: State | None) -> float:
        """The average earnings still to come."""
        if state is None:
            return 0.0
        if state not in self._values:
            shares = self._policy(state)
            self._values[state] = sum(share * self.after(state, letter) for letter, share in shares.items() if share)
        return self._values[state]

    def after(self, state: State, letter: str) -> float:
        """The average earnings after this letter."""
        return sum(each.chance * (each.reward + self.value(each.after)) for each in outcomes(state, letter))

    def advantage(self, state: State, letter: str) -> float:
        """By how much this letter is better than what the policy usually does: the true credit of the call."""
        return self.after(state, letter) - self.value(state)
