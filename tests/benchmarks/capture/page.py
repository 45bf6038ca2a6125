"""docs/capture.md and docs/capture.json: pure functions of the result files."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .conditions import CONDITIONS
from .recorders import RECORDERS
from .results import Result, read_all
from .scores import Score, share

ROOT = Path(__file__).parents[3]
PAGE, TABLE = ROOT / "docs" / "capture.md", ROOT / "docs" / "capture.json"
BLIND = [each.name for each in CONDITIONS if each.blind]
SEEING = [each.name for each in CONDITIONS if not each.blind]
_SHOWN = 4
"""Faults of one row that the page shows."""

_HEAD = """# The capture benchmark

How much of what an agent does reaches the training data? This page compares what recorders say about agents with what
happened: with the log of the model server that the agents called, and with the script that they followed.

```
make bench-capture
```

This plays every framework again, those with an environment of their own included. It writes the results to
`tests/benchmarks/capture/results`, one file each, this page, the sums to [capture.json](capture.json), and the table of
the [conformance page](conformance.md#what-was-measured). If it is interrupted, the next run goes on where it stopped.

## What is scored

| score | what it counts |
|---|---|
| calls | responses that were sampled and that an agent waited for: how many were recorded, in the right rollout |
| exact tokens | how many of them have exactly the prompt and response token ids of the model server's log |
| names | how many of them have the right agent |
| joins | results of tools: how many are recorded with the response that asked for them |
| status | how many of them have the right status: `ok`, `error`, `timeout` or `empty` |
| false joins | results at a response that did not ask for them, or at it once too often |
| extra | recorded responses that no agent waited for: doubled by a retry, or of a call that was given up |
| wrong | agents and statuses that are recorded, and are others |

A result is known by its tool call id; in text ReAct, which has no ids, by its tool and arguments.

A missing fact is not a wrong one, but the record should not look complete without it. *Missing* counts facts that
were not recorded. *Said* counts those of them that the recorder marks: agl gives the rollout the verdict `unobserved`,
with the evidence that is missing ([health](health.md)), or lists a tool result as joined with no call.

## How it is measured

A scripted model server answers the agents and logs the tokens of each reply. The agents are those of the
[conformance suite](conformance.md): the same scenarios, played by the same drivers with the real API of each framework,
and two more, a single call and a long history. A *cell* is one scenario with one API, streaming or not, in one form of
attaching. Nothing on this page is a time, so it should be the same on every machine. What a framework cannot play is a
gap on the conformance page, and is not played here.

Besides the conditions of the conformance suite, some scenarios are played like this:

| condition | what happens |
|---|---|
"""

_COST = """## What it costs

Names and tool results come from the agent's own process, tokens from the gateway. What both add to a call is measured
with OpenAI's client and with a LangChain agent, beside the same agents without agl: [how fast the server
is](server-performance.md).
"""

_RECORDERS = """## Recorders compared

Every recorder plays the same cells: chat completions, in the first form of each driver, under all conditions in which
evidence can be seen. Where rollouts run at the same time, only agl knows which call is whose; this is not counted
against the others. For the recorders other than agl, the agent's process has nothing of agl attached, and the gateway
only stands for the model server. Each recorder gets all that it recorded:

"""

_WHY = """## What fails, and why

**The OpenTelemetry exporter** sees the clients that it instruments, and no others. It records no token ids: replies
have them only if they are asked for, and spans have no attribute for them. A name is known where the framework, or the
agent's own code, makes `invoke_agent` spans. Without `execute_tool` spans, a result is known only from the messages of
a later call, which have no status; in text ReAct it is not known at all. Agents without a framework give their names by
a function of agl, which no other recorder can know.

**The logging proxy** sees every call, whatever the client. It does not know who calls: a system prompt distinguishes
agents, but it is no name. A reply that was lost and sent again is logged twice. A reply that no client waited for is
logged too: the proxy gets it from the model server, and does not notice that its client is gone. Tokens, statuses and
results without ids are not in the messages.

**agl**: every row that is not complete is here, with the first of what was wrong. "One response too many" of an agent
that was *given up* is a reply that arrived: where the framework makes its calls in a thread or a task that goes on, the
client of a cancelled agent still receives it, so it is no undelivered reply.

"""


def render(results: Sequence[Result]) -> str:
    """The page."""
    lines = [_HEAD.rstrip(), *(f"| {each.name} | {each.about} |" for each in CONDITIONS[1:]), ""]
    lines += ["## agl, by framework", "", *_table(["framework"], _by_framework(results)), ""]
    lines += ["Versions: " + "; ".join(_versions(each) for each in results) + ".", ""]
    lines += [
        "Where evidence is withheld, everything that is missing has to be said:",
        "",
        "| framework | cells | missing | said | wrong | false joins |",
        "|---|---|---|---|---|---|",
        *_blind(results),
        "",
        _COST.rstrip(),
        "",
        _RECORDERS.rstrip(),
        "",
        *(f"- **{each.name}**: {each.about}." for each in RECORDERS.values()),
        "",
        *_table(["recorder"], _by_recorder(results)),
        "",
        *_table(["framework", "recorder"], _by_both(results)),
        "",
        _WHY.rstrip(),
        "",
        *_faults(results),
    ]
    return "\n".join(lines).rstrip() + "\n"


def sums(results: Sequence[Result]) -> dict[str, Any]:
    """What docs/capture.json holds: the scores of each framework, as counts."""
    return {
        each.framework: {
            "versions": dict(each.versions),
            "agl": dataclasses.asdict(each.score("agl", conditions=SEEING)),
            "agl, evidence withheld": dataclasses.asdict(each.score("agl", conditions=BLIND)),
            "compared": {
                name: dataclasses.asdict(made) for name in RECORDERS if (made := each.score(name, compared=True)).cells
            },
        }
        for each in results
    }


def files(results: Sequence[Result]) -> Mapping[Path, str]:
    """Both files, as they have to be."""
    return {PAGE: render(results), TABLE: json.dumps(sums(results), indent=1, ensure_ascii=False) + "\n"}


def write() -> int:
    """Write both files from the results that are there."""
    for path, text in files(read_all()).items():
        path.write_text(text)
    return 0


def check() -> int:
    """1 if they are not up to date."""
    old = [path.name for path, text in files(read_all()).items() if not path.exists() or path.read_text() != text]
    if old:
        sys.stderr.write(f"{', '.join(old)}: not up to date. Run: python -m tests.benchmarks.capture --page\n")
    return int(bool(old))


_COLUMNS = (
    "cells",
    "calls",
    "exact tokens",
    "names",
    "joins",
    "status",
    "false joins",
    "extra",
    "wrong",
    "missing",
    "said",
)


def _table(heads: Sequence[str], rows: Iterator[tuple[Sequence[str], Score]]) -> Iterator[str]:
    yield f"| {' | '.join([*heads, *_COLUMNS])} |"
    yield "|---" * (len(heads) + len(_COLUMNS)) + "|"
    for names, score in rows:
        yield f"| {' | '.join([*names, *_cells(score)])} |"


def _cells(score: Score) -> list[str]:
    calls, tools = score.of_responses, score.of_tools
    shares = (
        (score.responses, calls),
        (score.tokens, calls),
        (score.names, calls),
        (score.joins, tools),
        (score.statuses, tools),
    )
    counts = score.false_joins, score.extra, score.misnamed + score.misjudged, score.missing, score.unobserved
    return [str(score.cells), *(share(*each) for each in shares), *map(str, counts)]


def _by_framework(results: Sequence[Result]) -> Iterator[tuple[Sequence[str], Score]]:
    scores = [(each.framework, each.score("agl", conditions=SEEING)) for each in results]
    yield from (((name,), score) for name, score in scores)
    yield ("**all**",), sum((score for _, score in scores), Score())


def _blind(results: Sequence[Result]) -> Iterator[str]:
    for each in results:
        score = each.score("agl", conditions=BLIND)
        counts = score.cells, score.missing, score.unobserved, score.misnamed + score.misjudged, score.false_joins
        yield f"| {each.framework} | {' | '.join(map(str, counts))} |"


def _by_recorder(results: Sequence[Result]) -> Iterator[tuple[Sequence[str], Score]]:
    for name in RECORDERS:
        scores = [each.score(name, compared=True) for each in _compared(results)]
        yield (name,), sum(scores, Score())


def _by_both(results: Sequence[Result]) -> Iterator[tuple[Sequence[str], Score]]:
    for each in _compared(results):
        for name in RECORDERS:
            yield (each.framework, name), each.score(name, compared=True)


def _compared(results: Sequence[Result]) -> list[Result]:
    """Frameworks that every recorder has played."""
    return [each for each in results if {row.recorder for row in each.rows} == set(RECORDERS)]


def _versions(result: Result) -> str:
    return ", ".join(f"{name} {version}" for name, version in result.versions.items())


def _faults(results: Sequence[Result]) -> Iterator[str]:
    rows = [
        (each.framework, row)
        for each in results
        for row in each.rows
        if row.recorder == "agl" and row.condition not in BLIND and not row.score.perfect
    ]
    for framework, row in rows:
        more = len(row.faults) - _SHOWN
        yield f"- {framework}; {row.scenario}, {row.condition}:"
        yield from (f"  - {fault}" for fault in row.faults[:_SHOWN])
        if more > 0:
            yield f"  - and {more} more"
    if not rows:
        yield "Nothing: there is no such row."
