"""TextWorld's generated quests as games of one letter a call.

TextWorld makes a world and a quest from a seed, and says which commands a state admits and what each changes. This
module adds the prompt: the goal, the room, the inventory, what the game said last, and the commands by letters.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import textworld
from textworld.generator import make_game
from textworld.generator.data import KnowledgeBase
from textworld.generator.inform7 import Inform7Game
from textworld.logic import Proposition
from textworld.logic import State as World

Facts: TypeAlias = frozenset[Proposition]
RULES = KnowledgeBase.load()
"""TextWorld's rules of houses, containers and keys; loading them takes a second."""


@dataclass(frozen=True)
class Game:
    """A task: the seed of the quest, its size, and how many calls there are."""

    seed: int
    rooms: int = 4
    objects: int = 6
    moves: int = 8
    """About the length of the quest's walkthrough."""
    calls: int = 20

    @property
    def quest(self) -> textworld.Game:
        return _make(self.seed, self.rooms, self.objects, self.moves)


@cache
def _make(seed: int, rooms: int, objects: int, moves: int) -> textworld.Game:
    options = textworld.GameOptions()
    options.kb, options.seeds = RULES, seed
    options.nb_rooms, options.nb_objects, options.quest_length = rooms, objects, moves
    options.grammar.theme = "basic"  # Its names are short: box3, A-key.
    return make_game(options)


@dataclass(frozen=True)
class State:
    """A game before a call."""

    game: Game
    facts: Facts
    turn: int = 0
    worked: bool = True
    """Whether the last command changed something."""

    @classmethod
    def first(cls, game: Game) -> State:
        return cls(game, frozenset(game.quest.world.state.facts))

    @property
    def commands(self) -> Mapping[str, Facts]:
        """The facts after each admissible command."""
        return _commands(self.game, self.facts)

    @property
    def letters(self) -> Mapping[str, str]:
        return dict(zip(string.ascii_letters, self.commands, strict=False))

    @property
    def room(self) -> str:
        return next(iter(self._names("at", "P")))

    @property
    def inventory(self) -> list[str]:
        return sorted(self._names("in", "I"))

    def _names(self, relation: str, of: str) -> set[str]:
        """The names of what stands in a relation to the player (P) or their inventory (I)."""
        pairs = [fact.names for fact in self.facts if fact.name == relation and of in fact.names]
        return {self.game.quest.infos[name].name for pair in pairs for name in pair if name != of}

    @property
    def prompt(self) -> str:
        return "\n".join(
            [
                f"goal {self.game.quest.walkthrough[-1]}",
                f"in {self.room}",
                f"have {', '.join(self.inventory) or 'nothing'}",
                "done" if self.worked else "nothing happens",
                *(f"{letter} {command}" for letter, command in self.letters.items()),
            ]
        )

    @property
    def won(self) -> bool:
        return _won(self.game, self.facts)

    @property
    def over(self) -> bool:
        return self.won or self.turn == self.game.calls

    def after(self, letter: str) -> State:
        """The next state. A letter that is no command's, and a command that changes no fact, did not work."""
        facts = self.commands.get(self.letters.get(letter, ""), self.facts)
        return replace(self, facts=facts, turn=self.turn + 1, worked=facts != self.facts)


@cache
def _won(game: Game, facts: Facts) -> bool:
    return all(quest.is_winning(World(RULES.logic, facts)) for quest in game.quest.quests)


@cache
def _commands(game: Game, facts: Facts) -> Mapping[str, Facts]:
    world = World(RULES.logic, facts)
    actions = list(world.all_applicable_actions(RULES.rules.values(), RULES.types.constants_mapping))
    named = dict(zip(Inform7Game(game.quest).gen_commands_from_actions(actions), actions, strict=True))
    return {command: frozenset(world.apply_on_copy(named[command]).facts) for command in sorted(named)}
