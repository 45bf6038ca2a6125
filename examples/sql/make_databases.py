"""Make the dozen databases of this example, from their names alone:

python examples/sql/make_databases.py
"""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

from sql_schemas import DATABASES, HELD_OUT, TRAINED, Table, fill

ROWS = (12, 30)


def make(file: Path, name: str, tables: tuple[Table, ...]) -> None:
    file.unlink(missing_ok=True)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA page_size = 512")
        fill(connection, tables, random.Random(name), ROWS)
        connection.execute("VACUUM")


if __name__ == "__main__":
    DATABASES.mkdir(exist_ok=True)
    for name, tables in (TRAINED | HELD_OUT).items():
        make(DATABASES / f"{name}.sqlite", name, tables)
