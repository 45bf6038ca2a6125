"""`agl view`."""

from __future__ import annotations

import secrets
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

Runs = Annotated[
    list[Path] | None,
    typer.Argument(help="Runs, or folders of runs; by default the folder ./runs.", metavar="[RUN]..."),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port; by default a free one.")]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Only print the address.")]


def add_commands(cli: typer.Typer) -> None:
    cli.command(rich_help_panel="Look at runs")(view)


def view(run: Runs = None, port: Port = 0, no_browser: NoBrowser = False) -> None:
    """Show finished and running runs in the browser: curves, groups side by side, and why a call got its advantage.

    Nothing is written to the runs. The pages can be seen on this machine alone, and only with the token in the printed
    address, since what agents start runs here too. From another machine, forward the port: ssh -L PORT:127.0.0.1:PORT.
    Ctrl-C ends it.
    """
    from agl_core.cli.screen import Screen
    from agl_server.http.listening import bind
    from agl_server.reading.runs import RUNS, find_run
    from agl_view.serving import address_of, answer

    folders = [path if _has_runs(path) else find_run(path) for path in run] if run else [RUNS]
    token, once = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    with bind("127.0.0.1", port) as listener:
        Screen().print(f"view:  {address_of(listener, '/', token)}")
        Screen().print("The token in it is for you alone. Ctrl-C ends this.")
        if not no_browser:
            address = address_of(listener, "/", once)
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()  # Some wait for their end.
        answer(listener, folders, token, once=once)


def _has_runs(folder: Path) -> bool:
    from agl_core.config.load import CONFIG_FILE

    return not (folder / CONFIG_FILE).is_file() and any(folder.glob(f"*/{CONFIG_FILE}"))
