"""The tables of docs/capture.md, and docs/capture.json: pure functions of the result files."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..tables import table
from .conditions import CONDITIONS
from .recorders import RECORDERS
from .results import Result, read_all
from .scores import Score, share

DOCS = Path(__file__).parents[3] / "docs"
PAGE, SUMS = DOCS / "capture.md", DOCS / "capture.json"
BLIND = [condition.name for condition in CONDITIONS if condition.blind]
SEEING = [condition.name for condition in CONDITIONS if not condition.blind]
MAX_FAULTS = 4
"""Faults of one row that the page shows."""
_COLUMNS = "cells | calls | exact tokens | names | joins | status | false joins | extra | wrong | missing | said"


def files(results: Sequence[Result]) -> Mapping[Path, str]:
    """Both files, as they have to be."""
    page = PAGE.read_text()
    for name, text in _blocks(results).items():
        begin, end = f"<!-- written by tests/benchmarks/capture: {name} -->", "<!-- to here -->"
        page = re.sub(f"(?<={begin}\n).*?(?={end})", lambda _, text=text: f"\n{text}\n\n", page, count=1, flags=re.S)
    return {PAGE: page, SUMS: json.dumps(_sums(results), indent=1, ensure_ascii=False) + "\n"}


def write() -> None:
    """Write both files from the results that are there."""
    for path, text in files(read_all()).items():
        path.write_text(text)


def _sums(results: Sequence[Result]) -> dict[str, Any]:
    """What docs/capture.json holds: the scores of each framework, as counts."""
    return {
        result.framework: {
            "versions": dict(result.versions),
            "agl": dataclasses.asdict(result.score("agl", conditions=SEEING)),
            "agl, evidence withheld": dataclasses.asdict(result.score("agl", conditions=BLIND)),
            "compared": {
                name: dataclasses.asdict(made)
                for name in RECORDERS
                if (made := result.score(name, compared=True)).cells
            },
        }
        for result in results
    }


def _blocks(results: Sequence[Result]) -> dict[str, str]:
    """The parts of the page that follow from results, by their names in its comments."""
    scores = [(result.framework, result.score("agl", conditions=SEEING)) for result in results]
    scores.append(("**all**", sum((score for _, score in scores), Score())))
    versions = (", ".join(f"{name} {version}" for name, version in result.versions.items()) for result in results)
    # Frameworks that every recorder has played.
    compared = [result for result in results if {row.recorder for row in result.rows} == set(RECORDERS)]
    sums = [(name, sum((result.score(name, compared=True) for result in compared), Score())) for name in RECORDERS]
    each = [
        (f"{result.framework} | {name}", result.score(name, compared=True)) for result in compared for name in RECORDERS
    ]
    return {
        "frameworks": f"{_scores('framework', scores)}\n\nVersions: {'; '.join(versions)}.",
        "withheld": table("framework | cells | missing | said | wrong | false joins", _withheld(results)),
        "recorders": f"{_scores('recorder', sums)}\n\n{_scores('framework | recorder', each)}",
        "faults": "\n".join(_faults(results)) or "Nothing: there is no such row.",
    }


def _scores(heads: str, rows: Iterable[tuple[str, Score]]) -> str:
    return table(f"{heads} | {_COLUMNS}", (f"{name} | {' | '.join(_cells(score))}" for name, score in rows))


def _cells(score: Score) -> list[str]:
    calls = (share(part, score.of_responses) for part in (score.responses, score.tokens, score.names))
    tools = (share(part, score.of_tools) for part in (score.joins, score.statuses))
    counts = score.false_joins, score.extra, score.misnamed + score.misjudged, score.missing, score.unobserved
    return [str(score.cells), *calls, *tools, *map(str, counts)]


def _withheld(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        score = result.score("agl", conditions=BLIND)
        counts = score.cells, score.missing, score.unobserved, score.misnamed + score.misjudged, score.false_joins
        yield f"{result.framework} | {' | '.join(map(str, counts))}"


def _faults(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        for row in result.rows:
            if row.recorder != "agl" or row.condition in BLIND or row.score.perfect:
                continue
            yield f"- {result.framework}; {row.scenario}, {row.condition}:"
            yield from (f"  - {fault}" for fault in row.faults[:MAX_FAULTS])
            if len(row.faults) > MAX_FAULTS:
                yield f"  - and {len(row.faults) - MAX_FAULTS} more"
