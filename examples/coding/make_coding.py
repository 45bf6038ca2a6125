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

from edit import KINDS, edited
from fixer import BASH, DONE, MAX_CALLS, SYSTEM
from made import PASSED, UNDONE, Bug, bugs_made, edits
from recipes import Demonstrations, Message, Recipe, Shape, opened, uses

MODULES = 1200

HABITS = {
    "test first": 0.75, "broken": 0.15, "right": 0.05, "test": 0.75, "again": 0.08, "undo": 0.45,
    "stop": 0.08, "on": 0.3,
}  # fmt: skip
"""How often the repairer tests before the first edit; edits what is not there; is right by luck; tests after an edit;
tests again; takes back what did not help; gives up; goes on when tests pass."""
FLAWLESS = {**dict.fromkeys(HABITS, 0.0), "test first": 1.0, "right": 0.1, "test": 1.0, "undo": 1.0}
Edit: TypeAlias = tuple[int, str]


def repaired(bug: Bug, rng: random.Random, habits: dict[str, float]) -> list[Message]:
    """The repairer's conversation, as the fixer has it with a model."""
    does = lambda habit: rng.random() < habits[habit]  # noqa: E731
    messages = opened(SYSTEM, f"Tests of {bug.name}.py fail. Repair it.")
    text, seen, is_tested, tried, undo = bug.mistaken, "", False, list[Edit](), (0, "")
    helped = True  # or there is nothing to take back
    for turn in range(MAX_CALLS):
        is_right = is_tested and seen == PASSED
        if not does("on") if is_right else turn and does("stop"):
            break
        if does("again" if is_tested else "test" if tried else "test first"):
            seen, is_tested = bug.first_failure(text), True
            messages += runs("python3 check.py", seen, turn)
            continue
        if is_tested and not is_right and not helped and does("undo"):
            line, new = undo
            helped = True
        else:
            line, new = chosen(bug, text, seen, tried, does, rng)
            undo = line, replaced(text, line, new)
            tried.append((line, new))
            is_tested = helped = False
        after, answer = edited(text, f"L{line}", new)
        if after == text:
            answer, helped = f"error: no change of L{line}", True
        text = after
        is_tested |= helped and bool(seen)
        messages += runs(f"python3 edit.py L{line} '{new}'", answer, turn)
    return [*messages, runs(f"echo {DONE}", "", MAX_CALLS)[0]]


def runs(command: str, output: str, turn: int) -> list[Message]:
    return uses("bash", json.dumps({"command": command}), output, f"call_{turn}")


def replaced(text: str, line: int, new: str) -> str:
    """The word, number or operator whose place an edit takes."""
    kind = next(kind for kind in KINDS if re.fullmatch(kind, new))
    match = re.search(kind, "".join(text.splitlines()[line - 1 : line]))
    return match[0] if match else new


def chosen(bug: Bug, text: str, seen: str, tried: list[Edit], does: Callable[[str], bool], rng: random.Random) -> Edit:
    """The next edit that the repairer tries."""
    shown = [int(label) for label in re.findall(r"^L(\d+) ", seen, re.MULTILINE)]
    if not shown or does("broken"):
        return rng.choice(shown or range(1, 13)), rng.choice([*UNDONE])
    plausible = [edit for edit in edits(text) if edit[1:] not in tried]
    if does("right") and (right := [edit for edit in plausible if edit[0] == bug.right]):
        return right[0][1:]
    plausible = [edit for edit in plausible if edit[1] in shown]
    return rng.choice(plausible)[1:] if plausible else (shown[0], "-")


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


CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "%s'
END = '"}}\n</tool_call>'
RECIPE = Recipe(
    Demonstrations(
        conversation,
        [BASH],
        lesson,
        phrases=(
            CALL % "python3 edit.py ",
            " '",
            f"'{END}",
            CALL % "python3 check.py" + END,
            CALL % f"echo {DONE}" + END,
        ),
        names=("+", "-", "*", "/", "//", "%", "<", "<=", ">", ">=", "==", "!=", *(f"L{line}" for line in range(1, 25))),
    ),
    Shape(vocabulary=512, hidden=64, layers=3, heads=4, kv_heads=4, initializer_range=0.12, copies=True),
    steps=450,
    batch=16,
    learning_rate=3e-3,
    reading=2 / 3,
)
