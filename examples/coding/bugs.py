"""Bugs to repair: small modules, each with one mistake that was planted by changing an operator, a number or a name.

A bug is kept if some tests of its module fail and others still pass, and one edit of the fixer repairs it. Modules of
held-out tasks are in no other task.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from edit import KINDS, edited

import agl_core

MODULES = {
    "cart": (
        """
def total(prices, discount):
    whole = sum(prices)
    if whole > 100:
        return whole - discount
    return whole


def cheapest(prices, default):
    if not prices:
        return default
    return min(prices)
""",
        """
def test_small_carts_have_no_discount():
    assert total([40, 60], 5) == 100

def test_large_carts_have_a_discount():
    assert total([80, 40], 5) == 115

def test_the_cheapest_is_found():
    assert cheapest([3, 1, 2], 0) == 1

def test_an_empty_cart_has_the_default():
    assert cheapest([], 7) == 7
""",
    ),
    "clock": (
        """
def minutes(hours, rest):
    return hours * 60 + rest


def later(now, added):
    return (now + added) % 1440


def is_night(now):
    return now < 360 or now >= 1320
""",
        """
def test_hours_are_sixty_minutes():
    assert minutes(2, 5) == 125

def test_a_day_begins_anew():
    assert later(1430, 20) == 10
    assert later(10, 20) == 30

def test_night_ends_at_six():
    assert is_night(359) and not is_night(360)

def test_night_begins_at_ten():
    assert is_night(1320) and not is_night(1319)
""",
    ),
    "words": (
        """
def longest(words):
    best = ""
    for word in words:
        if len(word) > len(best):
            best = word
    return best


def initials(words):
    return "".join(word[0] for word in words)


def count(words, letter):
    return sum(letter in word for word in words)
""",
        """
def test_the_longest_word_is_found():
    assert longest(["a", "ccc", "bb"]) == "ccc"

def test_the_first_of_equal_words_wins():
    assert longest(["ab", "cd"]) == "ab"

def test_initials():
    assert initials(["red", "blue"]) == "rb"

def test_words_with_a_letter_are_counted():
    assert count(["red", "blue", "tan"], "e") == 2
""",
    ),
    "bank": (
        """
def withdraw(balance, amount):
    if amount > balance:
        return balance
    return balance - amount


def interest(balance, percent):
    return balance * percent / 100


def transfer(source, target, amount):
    return source - amount, target + amount
""",
        """
def test_money_is_taken():
    assert withdraw(50, 20) == 30

def test_all_of_it_may_be_taken():
    assert withdraw(20, 20) == 0

def test_no_more_than_there_is():
    assert withdraw(10, 20) == 10

def test_interest():
    assert interest(200, 5) == 10

def test_a_transfer_keeps_the_sum():
    assert transfer(30, 10, 5) == (25, 15)
""",
    ),
    "grid": (
        """
def neighbours(x, y):
    return [(x - 1, y), (x + 1, y), (x, y - 1), (x, y + 1)]


def distance(a, b):
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def inside(x, y, size):
    return 0 <= x < size and 0 <= y < size
""",
        """
def test_neighbours():
    assert neighbours(2, 5) == [(1, 5), (3, 5), (2, 4), (2, 6)]

def test_distance():
    assert distance((1, 2), (4, 6)) == 7

def test_corners_are_inside():
    assert inside(0, 0, 3) and inside(2, 2, 3)

def test_edges_are_outside():
    assert not inside(3, 0, 3) and not inside(0, 3, 3) and not inside(-1, 0, 3)
""",
    ),
    "queue": (
        """
def push(items, item, limit):
    if len(items) >= limit:
        return items[1:] + [item]
    return items + [item]


def newest(items, number):
    return items[-number:]


def waiting(items, item):
    return items.index(item) + 1
""",
        """
def test_an_item_is_added():
    assert push([1], 2, 3) == [1, 2]

def test_the_oldest_item_goes():
    assert push([1, 2], 3, 2) == [2, 3]

def test_the_newest_items():
    assert newest([1, 2, 3], 2) == [2, 3]

def test_the_first_waits_for_one():
    assert waiting(["a", "b"], "a") == 1
""",
    ),
    "grades": (
        """
def mean(points):
    return sum(points) / len(points)


def passed(points, most):
    return points * 2 >= most


def grade(points):
    if points >= 90:
        return "A"
    if points >= 70:
        return "B"
    return "C"
""",
        """
def test_mean():
    assert mean([2, 4, 6]) == 4

def test_half_is_enough():
    assert passed(5, 10) and not passed(4, 10)

def test_the_best_grade():
    assert grade(90) == "A" and grade(89) == "B"

def test_the_second_grade():
    assert grade(70) == "B" and grade(69) == "C"
""",
    ),
    "text": (
        """
def shorten(text, width):
    if len(text) <= width:
        return text
    return text[: width - 1] + "."


def indent(text, depth):
    return " " * (depth * 2) + text


def is_palindrome(text):
    return text == text[::-1]
""",
        """
def test_a_short_text_stays():
    assert shorten("abcd", 4) == "abcd"

def test_a_long_text_is_cut():
    assert shorten("abcdef", 4) == "abc."

def test_indent():
    assert indent("x", 2) == "    x"

def test_palindromes():
    assert is_palindrome("level") and not is_palindrome("lever")
""",
    ),
    "stock": (
        """
def missing(wanted, there):
    return max(0, wanted - there)


def reorder(there, least, lot):
    if there < least:
        return lot
    return 0


def value(counts, prices):
    return sum(count * price for count, price in zip(counts, prices))
""",
        """
def test_missing():
    assert missing(5, 3) == 2

def test_nothing_is_missing():
    assert missing(3, 5) == 0

def test_a_low_stock_is_filled():
    assert reorder(2, 3, 10) == 10

def test_enough_is_enough():
    assert reorder(3, 3, 10) == 0

def test_value():
    assert value([2, 1], [3, 4]) == 10
""",
    ),
    "steps": (
        """
def triangle(n):
    return n * (n + 1) // 2


def power(base, times):
    result = 1
    for _ in range(times):
        result = result * base
    return result


def even(numbers):
    return [n for n in numbers if n % 2 == 0]
""",
        """
def test_triangle():
    assert [triangle(n) for n in (0, 1, 4)] == [0, 1, 10]

def test_power():
    assert power(2, 5) == 32

def test_the_power_of_zero_times():
    assert power(9, 0) == 1

def test_even():
    assert even([1, 2, 4, 5]) == [2, 4]
""",
    ),
}
EDIT = Path(__file__).with_name("edit.py").read_text()
HELD_OUT = ("grades", "stock", "steps")
PER_MODULE = 4

_SWAPS: dict[type[Any], type[Any]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.FloorDiv: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "sum": "len", "len": "sum"}


def mutants(code: str) -> Iterator[str]:
    """The module with one change, for each change that there is."""
    for number, node in enumerate(ast.walk(ast.parse(code))):
        for change in range(2):
            if isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare | ast.Constant | ast.Name):
                tree = ast.parse(code)
                if _changed([*ast.walk(tree)][number], change):
                    yield ast.unparse(tree)


def _changed(node: ast.AST, change: int) -> bool:
    """Change a node in its first or second way; False if there is none."""
    match node:
        case ast.BinOp(op=op) if change == 0 and type(op) in _SWAPS:
            node.op = _SWAPS[type(op)]()
        case ast.BoolOp(op=op) if change == 0:
            node.op = _SWAPS[type(op)]()
        case ast.Compare(ops=[op, *_]) if change == 0 and type(op) in _SWAPS:
            node.ops[0] = _SWAPS[type(op)]()
        case ast.Constant(value=int() as value):
            node.value = value + (1, -1)[change]
        case ast.Name(id=id) if change == 0 and id in _NAMES:
            node.id = _NAMES[id]
        case _:
            return False
    return True


def is_repairable(mutant: str, right: str) -> bool:
    """Whether one edit of the fixer undoes the change."""
    return any(
        edited(mutant, f"L{number}", match[0])[0] == right
        for number, line in enumerate(right.splitlines(), 1)
        for kind in KINDS
        if (match := re.search(kind, line))
    )


def outcomes(code: str, tests: str) -> dict[str, bool]:
    """Which tests pass, by name."""
    names: dict[str, Any] = {}
    exec(code + tests, names)
    passed = {}
    for name, function in names.items():
        if name.startswith("test_"):
            try:
                function()
                passed[name] = True
            except Exception:
                passed[name] = False
    return passed


CHECK = """

import sys

ran = []


def trace(frame, event, _):
    if frame.f_code.co_filename == MODULE:
        if event == "line":
            ran.append(frame.f_lineno)
        return trace


lines = open(MODULE).read().splitlines()
for name, test in [*globals().items()]:
    if name.startswith("test_"):
        ran.clear()
        sys.settrace(trace)
        try:
            test()
        except Exception as error:
            sys.settrace(None)
            at = error.__traceback__.tb_next.tb_lineno
            failed = open(__file__).read().splitlines()[at - 1].strip()
            print(failed, *(f"L{n} {lines[n - 1].strip()}" for n in sorted({*ran})), sep="\\n")
            raise SystemExit(1)
print("all tests pass")
"""
"""Runs the tests above it, and shows which line failed first, and which lines of the module it ran."""


def check(module: str, tests: str, failing: Sequence[str]) -> str:
    """A script of the failing tests, as someone who reports a mistake sends it along."""
    shown = (test for test in tests.strip().split("\n\n") if test[len("def ") : test.index("(")] in failing)
    top = f"import {module}\nfrom {module} import *\n\nMODULE = {module}.__file__\n\n\n"
    return top + "\n\n".join(shown) + CHECK


@agl_core.task_source
def bugs(*, part: Literal["train", "eval"] = "train", times: int = 1) -> Iterator[agl_core.Task]:
    """Modules with one planted mistake each, and hidden tests; each comes so many `times`, under ids of its own."""
    for number, (module, (code, tests)) in enumerate([*MODULES.items()] * times):
        if (module in HELD_OUT) != (part == "eval"):
            continue
        right = ast.unparse(ast.parse(code))
        candidates = [*dict.fromkeys(mutants(code))]
        random.Random(module).shuffle(candidates)
        kept = 0
        for mutant in candidates:
            results = outcomes(mutant, tests)
            if kept == PER_MODULE or all(results.values()) or not any(results.values()):
                continue
            if not is_repairable(mutant + "\n", right + "\n"):
                continue
            kept += 1
            file = f"test_{module}.py"
            passing, failing = ([name for name, passed in results.items() if passed is of] for of in (True, False))
            yield agl_core.Task(
                f"{module}-{number // len(MODULES) * PER_MODULE + kept}",
                {
                    "prompt": f"Tests of {module}.py fail. Repair it.",
                    "workspace": {
                        "files": {
                            f"{module}.py": mutant + "\n",
                            "check.py": check(module, tests, failing),
                            "edit.py": EDIT,
                        }
                    },
                },
                metadata={
                    "tests": {
                        "files": {file: f"from {module} import *\n{tests}"},
                        "fail_to_pass": [f"{file}::{name}" for name in failing],
                        "pass_to_pass": [f"{file}::{name}" for name in passing],
                    }
                },
            )
