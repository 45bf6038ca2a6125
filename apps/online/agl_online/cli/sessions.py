"""`agl sessions`: real use as it was recorded, its keys, and its removal."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path
from typing import Annotated

import typer

from agl_core.cli.options import AsJson
from agl_core.cli.screen import print_json
from agl_core.reading.words import number, one_line

Run = Annotated[Path, typer.Argument(help="The run: a folder, or a name below ./runs.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Sessions, by their ids.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="The session's id, or its beginning.")]
Application = Annotated[str, typer.Argument(help="The application, as in [online.applications].")]
OfApplication = Annotated[str | None, typer.Option("--application", help="Only those of this application.")]
Limit = Annotated[int, typer.Option(min=1, help="The number of sessions, the newest ones.")]
ForFeedback = Annotated[bool, typer.Option("--feedback", help="The key for feedback alone.")]

sessions = typer.Typer(help="List, show and delete sessions of real use.", no_args_is_help=True)


@sessions.command("list")
def list_(run: Run, application: OfApplication = None, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List the sessions of a run, the newest last."""
    from rich.table import Table

    from agl_core.cli.screen import Screen
    from agl_core.reading.runs import read_run
    from agl_online.recorded import list_sessions

    found = read_run(run, lambda store: list_sessions(store, limit, application))
    if as_json:
        print_json(found)
        return
    table = Table("session", "application", "name", "started", "ended", "calls", "feedback")
    for each in found:
        numbers = {name: value for said in each.feedback for name, value in said.rewards.items()}
        said = ", ".join(f"{one_line(name, 40)} {number(value)}" for name, value in numbers.items())
        table.add_row(
            each.id,
            one_line(each.application, 40),
            one_line(each.name or "-", 40),
            _when(each.started),
            each.ending.value if each.ending else "open",
            str(each.calls),
            said or ("said" if each.feedback else "-"),
        )
    Screen().print(table)


@sessions.command()
def show(run: Run, id: Id, as_json: AsJson = False) -> None:
    """Show a session and the feedback on it; agl show ID shows its calls."""
    from agl_core.cli.screen import Screen
    from agl_core.reading.runs import read_run
    from agl_online.recorded import find_session

    found = read_run(run, lambda store: find_session(store, id))
    if as_json:
        print_json(found)
        return
    screen = Screen()
    ended = found.ending.value if found.ending else "open"
    screen.print(f"{found.id}: {one_line(found.application, 40)}, {one_line(found.name or 'no name', 200)}")
    screen.print(f"{_when(found.started)}, {ended}, {found.calls} calls")
    for each in found.feedback:
        numbers = ", ".join(f"{one_line(name, 40)} {number(value)}" for name, value in each.rewards.items())
        about = f"call {one_line(each.call, 100)}" if each.call else "the session"
        screen.print(f"{_when(each.received)}, on {about}: {numbers or 'no number'}")
        for what, text in (("correction", each.correction), ("note", each.note)):
            if text is not None:
                screen.print(f"  {what}: {one_line(str(text), 400)}")
    screen.print(f"agl show {run} {found.id}")


@sessions.command()
def delete(run: Run, ids: Ids, as_json: AsJson = False) -> None:
    """Remove everything that was recorded of sessions, for good. Feedback on them is refused from then on."""
    from agl_core.cli.screen import Screen
    from agl_core.reading.runs import find_run
    from agl_core.wire.keys import OPERATOR_KEY, take_keys
    from agl_online.recorded import delete_sessions

    deleted = asyncio.run(delete_sessions(find_run(run), ids, take_keys().get(OPERATOR_KEY)))
    if as_json:
        print_json({"deleted": deleted})
        return
    Screen().print(
        f"{deleted} sessions deleted" + (f"; of {len(ids) - deleted} nothing was left" if deleted < len(ids) else "")
    )


@sessions.command()
def key(run: Run, application: Application, feedback: ForFeedback = False) -> None:
    """Print a key of an application: for its model calls and sessions, or for feedback on these."""
    from agl_core.reading.runs import find_run
    from agl_online.recorded import key_of

    typer.echo(key_of(find_run(run), application, feedback=feedback))


def _when(moment: float | None) -> str:
    return "-" if moment is None else f"{datetime.datetime.fromtimestamp(moment):%Y-%m-%d %H:%M:%S}"
