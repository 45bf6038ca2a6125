"""`agl versions`: which versions answer the sessions of a deployed run, and deciding that by hand."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from agl_core.cli.options import AsJson
from agl_core.cli.screen import print_json
from agl_core.reading.words import one_line, score

Run = Annotated[Path, typer.Argument(help="The run: a folder, or a name below ./runs.")]
Name = Annotated[
    str, typer.Argument(metavar="NAME[@STEP]", help="As calc@40; calc alone means the version named above.")
]
Policy = Annotated[str, typer.Argument(metavar="NAME", help="As calc.")]
Reason = Annotated[str | None, typer.Option(help="Why, for the ledger.")]
Untested = Annotated[bool, typer.Option("--untested", help="Also a version that the gate did not pass.")]

versions = typer.Typer(help="List, promote and roll back the versions that answer real use.", no_args_is_help=True)


@versions.command("list")
def list_(run: Run, as_json: AsJson = False) -> None:
    """List the versions of a deployed run: what each is, since when and why, and the figures behind it.

    "greedy" and "sampled" are rewards at the gate, "live" is the mean reward of "sessions" beside another version.
    """
    from rich.table import Table

    from agl_core.cli.screen import Screen
    from agl_core.reading.runs import find_run
    from agl_online.operating import list_versions

    found = list_versions(find_run(run))
    if as_json:
        print_json(found)
        return
    table = Table("version", "state", "since", "by")
    for column in ("greedy", "sampled", "live", "sessions"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("reason")
    for each in found:
        since = datetime.datetime.fromtimestamp(each.since).isoformat(" ", "minutes")
        numbers = [score(value) for value in (each.greedy, each.sampled, each.live)]
        sessions = "–" if each.sessions is None else str(each.sessions)
        table.add_row(each.name, each.state, since, each.by, *numbers, sessions, one_line(each.reason, 100))
    Screen().print(table)


@versions.command()
def promote(name: Name, untested: Untested = False, reason: Reason = None) -> None:
    """Make a version the stable one. Without @STEP it is the canary, or else the last one that passed the gate.

    New sessions get it; those that are open keep theirs.
    """
    from agl_online.operating import promote as decide

    _say(f"{decide(name, untested=untested, reason=reason)} is the stable version")


@versions.command()
def rollback(name: Name, reason: Reason = None) -> None:
    """Withdraw a version at once, from open sessions too. Without @STEP it is the canary, or else the stable version.

    If it was the stable version, the one before it is stable again.
    """
    from agl_online.operating import roll_back

    _say(f"{roll_back(name, reason=reason)} is rolled back")


@versions.command()
def pin(name: Name, untested: Untested = False, reason: Reason = None) -> None:
    """Have one version answer all sessions until it is unpinned. Without @STEP it is the stable version.

    Meanwhile there is no canary, and nothing is promoted.
    """
    from agl_online.operating import pin as decide

    _say(f"{decide(name, untested=untested, reason=reason)} is pinned")


@versions.command()
def unpin(name: Policy, reason: Reason = None) -> None:
    """End a pin: the version goes back to the state that it had before."""
    from agl_online.operating import unpin as decide

    _say(f"the pin ended; {decide(name, reason=reason)} is the stable version")


def _say(text: str) -> None:
    from agl_core.cli.screen import Screen

    Screen().print(text)
