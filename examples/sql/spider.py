"""Spider (arXiv 1809.08887) from a local folder, in its own format, and its four bands of difficulty.

spider/train_spider.json, dev.json      [{"db_id": …, "question": …, "query": …}, …]
spider/tables.json                      [{"db_id": …}, …]
spider/database/DB/DB.sqlite
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Difficulty(StrEnum):
    """Spider's bands."""

    EASY = "easy"
    MEDIUM = "medium"
    HARD = "hard"
    EXTRA = "extra"


FILES = {"train": "train_spider.json", "dev": "dev.json"}

_TOKEN = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\w+|[^\w\s]""")
_CLAUSES = ("select", "from", "where", "group", "having", "order", "limit")
_SET_OPERATIONS = ("intersect", "union", "except")
_AGGREGATES = ("count", "sum", "avg", "min", "max")


def difficulty(query: str) -> Difficulty:
    """The band of a query, by counting its components as Spider does, approximately.

    It counts words, where Spider's own script parses the query by the schema: the two may differ where a query is in
    the FROM of another, or where an alias has the name of a keyword.

    >>> difficulty("SELECT name FROM singer WHERE age > 20")
    <Difficulty.EASY: 'easy'>
    >>> difficulty("SELECT name FROM singer WHERE age > (SELECT avg(age) FROM singer)")
    <Difficulty.HARD: 'hard'>
    """
    outer, nested = _outermost([token.lower() for token in _TOKEN.findall(query)])
    clauses = _clauses(outer)
    where, having, joined = clauses.get("where", []), clauses.get("having", []), clauses.get("from", [])
    conditions = where + having + joined
    basic = sum(name in clauses for name in ("where", "group", "order", "limit"))
    basic += joined.count("join") + joined.count(",") + conditions.count("or") + conditions.count("like")
    aggregates = sum(outer.count(name) for name in _AGGREGATES)
    connected = where.count("and") + where.count("or") - where.count("between")
    more = sum(
        (
            aggregates > 1,
            _listed(clauses.get("select", [])) > 1,
            connected > 0,
            _listed(clauses.get("group", [])) > 1,
        )
    )
    if basic <= 1 and more == 0 and nested == 0:
        return Difficulty.EASY
    if nested == 0 and ((more <= 2 and basic <= 1) or (basic <= 2 and more < 2)):
        return Difficulty.MEDIUM
    if (nested == 0 and ((more > 2 and basic <= 2) or (2 < basic <= 3 and more <= 2))) or (
        nested == 1 and basic <= 1 and more == 0
    ):
        return Difficulty.HARD
    return Difficulty.EXTRA


def _outermost(tokens: list[str]) -> tuple[list[str], int]:
    """The tokens of the first query alone, and how many queries are in it or combined with it."""
    kept: list[str] = []
    nested = depth = 0
    skipped_from: int | None = None
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        if token == "(":
            depth += 1
            if following == "select" and skipped_from is None:
                skipped_from = depth
                nested += 1
        if skipped_from is None:
            if token in _SET_OPERATIONS and depth == 0:
                return kept, nested + 1
            kept.append(token)
        if token == ")":
            if depth == skipped_from:
                skipped_from = None
            depth -= 1
    return kept, nested


def _clauses(tokens: list[str]) -> dict[str, list[str]]:
    clauses: dict[str, list[str]] = {}
    current: list[str] = []
    for token in tokens:
        if token in _CLAUSES:
            current = clauses.setdefault(token, [])
        else:
            current.append(token)
    return clauses


def _listed(tokens: list[str]) -> int:
    """How many things a clause lists; commas in parentheses separate arguments."""
    depth = commas = 0
    for token in tokens:
        depth += (token == "(") - (token == ")")
        commas += token == "," and depth == 0
    return commas + 1 if tokens else 0


@dataclass(frozen=True)
class Asked:
    question: str
    query: str
    database: Path
    difficulty: Difficulty


def questions(folder: Path, split: str) -> list[Asked]:
    """The questions of a split. ValueError if one asks a database that `tables.json` does not list or has no file."""
    listed = {database["db_id"] for database in _read(folder / "tables.json")}
    made = []
    for entry in _read(folder / FILES[split]):
        name = entry["db_id"]
        file = (folder / "database" / name / f"{name}.sqlite").resolve()
        if name not in listed:
            raise ValueError(f"{folder / FILES[split]} asks the database '{name}', which tables.json does not list")
        if not file.is_file():
            raise ValueError(f"{folder / FILES[split]} asks the database '{name}', but there is no file {file}")
        made.append(Asked(entry["question"], entry["query"], file, difficulty(entry["query"])))
    return made


def _read(file: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return entries
