"""Demonstrations for the tiny policy: bugs of modules that a program makes up, and a repairer who is often wrong.

No module of `bugs.py` is among them. The repairer knows which edits would undo a mistake of their kinds, and not which
of them is right: it tries, and takes back what did not help. With `HABITS` it also forgets to test, or gives up.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import TypeAlias

from fixer import MAX_CALLS, SYSTEM, TOOLS, edited
from made import PASSED, UNDONE, Bug, bugs_made, edits
from recipes import Demonstrations, Message, Recipe, Shape, opened, says, uses

MODULES = 1200

HABITS = {
    "test first": 0.75, "broken": 0.15, "right": 0.05, "test": 0.75, "again": 0.08, "undo": 0.45,
    "stop": 0.08, "on": 0.3,
}  # fmt: skip
"""How often the repairer tests before the first edit; edits what is not there; is right by luck; tests after an edit;
tests again; takes back what did not help; gives up; goes on when tests pass."""
FLAWLESS = {**dict.fromkeys(HABITS, 0.0), "test first": 1.0, "right": 0.1, "test": 1.0, "undo": 1.0}
Edit: TypeAlias = tuple[int, str, str]


def repaired(bug: Bug, rng: random.Random, habits: dict[str, float]) -> list[Message]:
    """The repairer's conversation, as the fixer has it with a model."""
    does = lambda habit: rng.random() < habits[habit]  # noqa: E731
    messages = opened(SYSTEM, f"Tests of {bug.name}.py fail. Repair it.")
    text, seen, is_tested, tried = bug.mistaken, "", False, list[Edit]()
    helped = True  # or there is nothing to take back
    for turn in range(MAX_CALLS):
        is_right = is_tested and seen == PASSED
        if not does("on") if is_right else turn and does("stop"):
            break
        if does("again" if is_tested else "test" if tried else "test first"):
            seen, is_tested = bug.first_failure(text), True
            messages += uses("test", "{}", seen, f"call_{turn}")
            continue
        if is_tested and not is_right and not helped and does("undo"):
            line, new, old = tried[-1]
            helped = True
        else:
            line, old, new = chosen(bug, text, seen, tried, does, rng)
            tried.append((line, old, new))
            is_tested = helped = False
        text, answer = edited(text, line, old, new)
        helped |= answer.startswith("error")
        is_tested |= helped and bool(seen)
        messages += uses("edit", json.dumps({"line": f"L{line}", "old": old, "new": new}), answer, f"call_{turn}")
    return [*messages, says("Done.")]


def chosen(bug: Bug, text: str, seen: str, tried: list[Edit], does: Callable[[str], bool], rng: random.Random) -> Edit:
    """The next edit that the repairer tries."""
    shown = [int(label) for label in re.findall(r"^L(\d+) ", seen, re.MULTILINE)]
    if not shown or does("broken"):
        old = rng.choice([*UNDONE])
        return rng.choice(shown or range(1, 13)), old, rng.choice(UNDONE[old])
    plausible = [edit for edit in edits(text) if edit[1:] not in tried]
    if does("right") and (right := [edit for edit in plausible if edit[0] == bug.right]):
        return right[0][1:]
    plausible = [edit for edit in plausible if edit[1] in shown]
    return rng.choice(plausible)[1:] if plausible else (shown[0], "+", "-")


def demonstrated(seed: int, index: int, habits: dict[str, float]) -> list[Message]:
    rng = random.Random(f"{seed}/{index}")
    while not (bugs := bugs_made(rng.randrange(MODULES))):
        continue
    return repaired(rng.choice(bugs), rng, habits)


def conversation(seed: int, index: int) -> list[Message]:
    """The demonstration of a repairer with `HABITS`."""
    return demonstrated(seed, index, HABITS)


def lesson(seed: int, index: int) -> list[Message]:
    """One who tests first and after each edit, edits what fails, and takes back what does not help."""
    return demonstrated(seed, index, FLAWLESS)


CALL = '<tool_call>\n{"name": "%s", "arguments": {'
RECIPE = Recipe(
    Demonstrations(
        conversation,
        TOOLS,
        lesson,
        phrases=(
            CALL % "edit" + '"line": "',
            '", "old": "',
            '", "new": "',
            '"}}\n</tool_call>',
            CALL % "test" + "}}\n</tool_call>",
        ),
        names=("+", "-", "*", "/", "//", "%", "<", "<=", ">", ">=", "==", "!=", *(f"L{line}" for line in range(1, 25))),
    ),
    Shape(vocabulary=512, hidden=64, layers=3, heads=4, kv_heads=4, initializer_range=0.12, copies=True),
    steps=300,
    batch=16,
    learning_rate=3e-3,
    reading=1.0,  # With the habits too it began at 6%, and most groups had no contrast.
)
