"""How fast the Lightning Server is.

    python tests/benchmarks/server_speed.py

prints four tables: agents' calls, calls with ever more in the store, rollouts, and light workers. The server has one
core, the client and a scripted upstream share another one; everything is written to a store on disk as in training.
Needs a quiet machine; takes about five minutes. `--only calls` makes one table, `--quick` only shows that it works,
`--write` puts the tables into docs/server-performance.md. It fails as soon as a request gets an error.
"""

from __future__ import annotations

import argparse
import datetime
import re
import tempfile
from pathlib import Path

from server_cores import cores, machine, pin
from server_tables import Tables

from agl_core.server.http.event_loop import run

PAGE = Path(__file__).parents[2] / "docs" / "server-performance.md"
BEGIN, END = "<!-- measured by tests/benchmarks/server_speed.py -->", "<!-- end -->"


async def measure(parts: list[str], scale: float) -> list[str]:
    """The tables that are asked for, printed as soon as they are there."""
    with tempfile.TemporaryDirectory() as folder:
        tables = Tables(Path(folder), scale)
        made = []
        for name, part in tables.parts.items():
            if not parts or name in parts:
                made.append(await part())
                print(f"{made[-1]}\n", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(Tables(Path(), 1).parts), help="repeatable")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.write and (options.only or options.quick):
        parser.error("--write is for all tables, measured in full")
    pin(cores()[1])
    made = run(measure(options.only or [], 0.1 if options.quick else 1.0))
    if options.write:
        tables = "\n\n".join([f"Measured {datetime.date.today():%B %Y} on: {machine()}", *made])
        text = PAGE.read_text()
        PAGE.write_text(re.sub(f"(?<={BEGIN}\n).*(?=\n{END})", lambda _: tables, text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
