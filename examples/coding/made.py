"""Bugs of modules that a program makes up: more than anyone writes, for demonstrations and for training."""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from bugs import EDIT, check, mutants
from edit import KINDS, edited

import agl_core

FIRST_MODULE = 20_000
PASSED = "all tests pass"
WORDS = (  # noqa: SIM905
    "age area apples bag bill bonus books box cost count day debt depth dose end fee first fuel gain gap goal heat"
    " height hour index key last left length level limit load loss mass mark month most name need next offer pages"
    " part pay place plan point price rate rest result rise room score share size speed start step stop sum_of tax"
    " team term time tip top train trip turn unit used value wage week weight width year zone"
).split()
NUMBERS = (*range(11), 12, 15, 20, 24, 30, 50, 60, 80, 100, 365, 1000)
UNDONE = {
    "+": ("-", "*"), "-": ("+",), "*": ("/", "//"), "//": ("%",), "<": ("<=",), "<=": ("<",), ">": (">=",),
    ">=": (">",), "!=": ("==",), "and": ("or",), "or": ("and",), "min": ("max",), "max": ("min",), "sum": ("len",),
    "len": ("sum",),
}  # fmt: skip
"""The edits that undo what `bugs.mutants` does to a word or an operator; a number goes one up or down."""


@dataclass
class Writer:
    """Makes up functions of one or two lines, and arguments for them."""

    rng: random.Random
    names: list[str] = field(default_factory=list)

    def name(self) -> str:
        self.names.append(self.rng.choice([word for word in WORDS if word not in self.names]))
        return self.names[-1]

    def term(self, *names: str) -> str:
        """A small expression."""
        rng = self.rng
        left, right = rng.choice(names), rng.choice([*names, str(rng.choice(NUMBERS))])
        operator = rng.choice(["+", "-", "*", "/", "//", "%", "+", "-", "*"])
        match rng.randrange(6):
            case 0:
                return f"{rng.choice(['min', 'max'])}({left}, {right})"
            case 1:
                return f"({left} {operator} {right}) {rng.choice('+-*')} {rng.choice([*names, rng.choice(NUMBERS)])}"
            case _:
                return f"{left} {operator} {right}"

    def condition(self, *names: str) -> str:
        rng = self.rng
        compared = f"{rng.choice(names)} {rng.choice(['<', '<=', '>', '>=', '=='])} {rng.choice([*names, *NUMBERS])}"
        if rng.random() < 0.2:
            joined = rng.choice(["and", "or"])
            return f"{compared} {joined} {rng.choice(names)} {rng.choice('<>')} {rng.choice(NUMBERS)}"
        if rng.random() < 0.15:
            return f"{rng.choice(names)} % {rng.choice((2, 3, 5))} == {rng.choice((0, 1))}"
        return compared

    def function(self) -> tuple[str, str, Callable[[], str]]:
        """Name, code, and what makes up arguments."""
        rng, self.names = self.rng, []
        name, a, b, c = (self.name() for _ in range(4))
        number = lambda: str(rng.choice((rng.randrange(8), rng.choice(NUMBERS))))  # noqa: E731
        numbers = lambda: str([rng.randrange(9) for _ in range(rng.randrange(2, 5))])  # noqa: E731
        two, pair = lambda: f"{number()}, {number()}", lambda: f"{numbers()}, {number()}"
        result = lambda: rng.choice([a, b, number(), self.term(a, b), f'"{rng.choice("ABC")}"'])  # noqa: E731
        graded = lambda: f" if {self.condition(a)}:\n  return 'B'\n return 'C'"  # noqa: E731
        total = f"{rng.choice(['sum', 'len', 'min', 'max'])}({a})"
        shapes: list[tuple[str, str, Callable[[], str]]] = [
            (f"{a}, {b}", f"return {self.term(a, b)}", two),
            (a, f"return {self.term(a)}", number),
            (f"{a}, {b}", f"return {self.condition(a, b)}", two),
            (f"{a}, {b}", f"if {self.condition(a, b)}:\n  return {result()}\n return {result()}", two),
            (a, f"if {self.condition(a)}:\n  return {number()}\n{graded()}", number),
            (f"{a}, {b}", f"{c} = {total}\n if {self.condition(c, b)}:\n  return {self.term(c, b)}\n return {c}", pair),
            (f"{a}, {b}", f"return {total} {rng.choice('+-*/')} {b}", pair),
            (a, f"return {total} {rng.choice('+-*/')} {rng.choice(['sum', 'len', 'max'])}({a})", numbers),
            (f"{a}, {b}", f"return [{self.term(c, b)} for {c} in {a}]", pair),
            (f"{a}, {b}", f"return [{c} for {c} in {a} if {self.condition(c, b)}]", pair),
            (f"{a}, {b}", f"return {rng.choice(['sum', 'max'])}({self.term(c, b)} for {c} in {a})", pair),
            (f"{a}, {b}", f"{c} = {number()}\n for _ in {a}:\n  {c} = {self.term(c, b)}\n return {c}", pair),
            (f"{a}, {b}", f"return {a}[{rng.randrange(3)}:] + [{b}]", pair),
            (f"{a}, {b}", f"return {a}[:{b} {rng.choice('+-')} {rng.choice((1, 2))}]", pair),
            (a, f"return {a}[{rng.choice((0, 1, -1))}] {rng.choice('+-*')} {rng.choice((1, 2, 10))}", numbers),
        ]  # fmt: skip
        arguments, body, values = rng.choice(shapes)
        return name, f"def {name}({arguments}):\n {body}\n", values


@dataclass(frozen=True)
class Bug:
    """A mistake in a made-up module, and its failing tests."""

    name: str
    mistaken: str
    right: str
    tests: tuple[str, ...]
    """The lines of tests that fail."""
    others: tuple[str, ...] = ()
    """Lines of tests that pass."""

    def first_failure(self, text: str) -> str:
        """The answer of the tool `test`, as check.py gives it."""
        names: dict[str, Any] = {}
        try:
            exec(compile(text, self.name, "exec"), names)
        except SyntaxError:
            return "error: SyntaxError"
        lines = text.splitlines()
        for line in self.tests:
            ran = set[int]()

            def trace(frame: Any, event: str, _: Any, ran: set[int] = ran) -> Any:
                if frame.f_code.co_filename == self.name:
                    if event == "line":
                        ran.add(frame.f_lineno)
                    return trace
                return None

            sys.settrace(trace)
            passed = holds(line, names)
            sys.settrace(None)
            if not passed:
                return "\n".join([f"error: {line}", *(f"L{n} {lines[n - 1].strip()}" for n in sorted(ran))])
        return PASSED


def holds(line: str, names: dict[str, Any]) -> bool:
    try:
        exec(line, names)
        return True
    except Exception:
        return False


def made_bugs(number: int) -> Iterator[Bug]:
    """Up to four bugs of one made-up module."""
    rng = random.Random(f"module/{number}")
    writer, functions = Writer(rng), []
    while len(functions) < rng.choice((2, 3, 3)):
        name, code, values = writer.function()
        if name not in [other for other, _, _ in functions]:
            functions.append((name, code, values))
    right = ast.unparse(ast.parse("\n\n".join(code for _, code, _ in functions))) + "\n"
    names: dict[str, Any] = {}
    exec(right, names)
    tests = []
    for name, _, values in functions:
        for _ in range(3):
            call = f"{name}({values()})"
            try:
                value = eval(call, names)
            except (ZeroDivisionError, ValueError, TypeError):
                continue
            if len(repr(value)) < 16:
                line = f"assert {'not ' * (value is False)}{call}" + (
                    "" if isinstance(value, bool) else f" == {value!r}"
                )
                tests.append(line)
    rng.shuffle(tests)
    candidates = [text + "\n" for text in dict.fromkeys(mutants(right)) if text + "\n" != right]
    rng.shuffle(candidates)
    kept = 0
    for mistaken in candidates:
        names = {}
        exec(mistaken, names)
        failing = tuple(test for test in tests if not holds(test, names))
        if failing and kept < 4 and any(text == right for text, *_ in edits(mistaken)):
            kept += 1
            others = tuple(test for test in tests if test not in failing)
            yield Bug(rng.choice(WORDS), mistaken, right, failing, others)


def edits(text: str) -> list[tuple[str, int, str]]:
    """The edits that may undo a mistake, as their text, line and new word, number or operator."""
    listed = []
    for number, line in enumerate(text.splitlines(), 1):
        for old in (match[0] for kind in KINDS if (match := re.search(kind, line))):
            news = (str(int(old) + 1), str(abs(int(old) - 1))) if old.isdigit() else UNDONE.get(old, ())
            listed += [(after, number, new) for new in news if (after := edited(text, f"L{number}", new)[0]) != text]
    return listed


@cache
def bugs_made(number: int) -> tuple[Bug, ...]:
    return tuple(made_bugs(number))


@agl_core.task_source
def made_up(*, modules: int = 128) -> Iterator[agl_core.Task]:
    """One bug of each of so many modules; no demonstration has them."""
    for number in range(FIRST_MODULE, FIRST_MODULE + modules):
        for bug in bugs_made(number)[:1]:
            names = {test: f"test_{at}" for at, test in enumerate((*bug.tests, *bug.others))}
            tests = "\n\n".join(f"def {name}():\n    {test}" for test, name in names.items())
            file = f"test_{bug.name}.py"
            yield agl_core.Task(
                f"made-{number}",
                {
                    "prompt": f"Tests of {bug.name}.py fail. Repair it.",
                    "workspace": {
                        "files": {
                            f"{bug.name}.py": bug.mistaken,
                            "check.py": check(bug.name, tests, [names[test] for test in bug.tests]),
                            "edit.py": EDIT,
                        }
                    },
                },
                metadata={
                    "tests": {
                        "files": {file: f"from {bug.name} import *\n\n{tests}\n"},
                        "fail_to_pass": [f"{file}::{names[test]}" for test in bug.tests],
                        "pass_to_pass": [f"{file}::{names[test]}" for test in bug.others],
                    }
                },
            )
