"""The store's queries and removals, each in one transaction; `agl_core.store.Store` says what they promise."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar, Unpack

import numpy as np
import orjson
from numpy.typing import NDArray

from agl_core.errors import StoreRefusedError
from agl_core.store import RolloutFilter
from agl_core.types import Attempt, AttemptKey, Call, Ending, Mode, Rollout, RolloutState, Run
from agl_core.types.forms import dump_json, from_json, load_json
from agl_server.store.codec import (
    LEASES,
    NUMBERS,
    ROLLOUTS,
    Data,
    Pieces,
    Rows,
    decode,
    decode_call,
    encode,
    insertion,
    numbers_in,
)
from agl_server.store.connections import transaction

Kept = TypeVar("Kept")

_PREFIX_MATCHES_SHOWN = 5
_REFERENCES = "SELECT pieces FROM records"
_ASKED = (
    "FROM json_each(?) AS asked CROSS JOIN attempts ON attempts.rollout = json_extract(asked.value, '$[0]') "
    "AND attempts.attempt = json_extract(asked.value, '$[1]') "
    "CROSS JOIN records ON records.owner = attempts.seq AND records.kind = ?"
)
"""One statement for any number of attempts: CROSS JOIN makes SQLite look up each of them by the index."""
_NO_PIECES = Pieces(first=0)
"""Rollouts and attempts, which the queue writes, have none."""


def claim(
    connection: sqlite3.Connection, worker: str, count: int, renewals: int
) -> tuple[list[tuple[Rollout, Attempt]], Rows]:
    """Lease the rollouts that were recorded first, so that those tried again come before all new ones."""
    waiting = connection.execute(
        "SELECT body, (SELECT count(*) FROM attempts WHERE attempts.rollout = id) FROM rollouts WHERE state = ? "
        "ORDER BY seq LIMIT ?",
        (RolloutState.QUEUED.value, count),
    )
    claimed = []
    for body, number in waiting:
        rollout = replace(from_json(Rollout, load_json(body)), state=RolloutState.RUNNING)
        claimed.append((rollout, Attempt(rollout.id, number, worker, time.time())))
    # Their rows are written at the end of the transaction; until then its other claims must not find them.
    taken = orjson.dumps([rollout.id for rollout, _ in claimed]).decode()
    connection.execute(
        "UPDATE rollouts SET state = ? WHERE id IN (SELECT value FROM json_each(?))",
        (RolloutState.RUNNING.value, taken),
    )
    rows = encode((record for records in claimed for record in records), _NO_PIECES)
    return claimed, {**rows, LEASES: [(*attempt.key, worker, renewals) for _, attempt in claimed]}


def renew(connection: sqlite3.Connection, worker: str, keys: Collection[AttemptKey]) -> tuple[set[AttemptKey], Rows]:
    those = "(rollout, attempt) IN (SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?))"
    named = _asked(keys)
    connection.execute(
        f"UPDATE leases SET renewals = renewals + 1 WHERE worker = ? AND renewals = 0 OR {those}", (worker, named)
    )
    rows = connection.execute(f"SELECT rollout, attempt FROM leases WHERE {those}", (named,))
    return {AttemptKey(*row) for row in rows}, {}


def end_lease(connection: sqlite3.Connection, key: AttemptKey) -> bool:
    return connection.execute("DELETE FROM leases WHERE rollout = ? AND attempt = ?", key).rowcount > 0


def cancel_waiting(
    connection: sqlite3.Connection, ids: Collection[str], ending: Ending
) -> tuple[int, list[AttemptKey]]:
    those, asked = "IN (SELECT value FROM json_each(?))", orjson.dumps(list(ids)).decode()
    with transaction(connection):
        bodies = connection.execute(
            f"SELECT body FROM rollouts WHERE state = ? AND +id {those}", (RolloutState.QUEUED.value, asked)
        )
        rollouts = [replace(rollout, state=RolloutState.DONE, ending=ending) for rollout in decode(Rollout, bodies)]
        rows = encode(rollouts, _NO_PIECES).get(ROLLOUTS, ())
        connection.executemany(insertion(ROLLOUTS, 1), rows)
        leased = connection.execute(f"SELECT rollout, attempt FROM leases WHERE rollout {those}", (asked,))
        return len(rows), [AttemptKey(*row) for row in leased]


def leases(connection: sqlite3.Connection) -> tuple[int, dict[AttemptKey, int]]:
    queued = (RolloutState.QUEUED.value,)
    (waiting,) = connection.execute("SELECT count(*) FROM rollouts WHERE state = ?", queued).fetchone()
    rows = connection.execute("SELECT rollout, attempt, renewals FROM leases")
    return waiting, {AttemptKey(rollout, attempt): renewals for rollout, attempt, renewals in rows}


def done(connection: sqlite3.Connection, ids: Collection[str]) -> list[Rollout]:
    rows = connection.execute(
        "SELECT body FROM json_each(?) AS asked CROSS JOIN rollouts ON rollouts.id = asked.value "
        "WHERE rollouts.state = ? ORDER BY rollouts.seq",
        (orjson.dumps(list(set(ids))).decode(), RolloutState.DONE.value),
    )
    return decode(Rollout, rows)


def runs(connection: sqlite3.Connection) -> list[Run]:
    return decode(Run, connection.execute("SELECT body FROM runs ORDER BY seq"))


def rollouts(connection: sqlite3.Connection, **wanted: Unpack[RolloutFilter]) -> list[Rollout]:
    limit, newest = wanted.get("limit"), wanted.get("newest")
    given = {name: value for name, value in wanted.items() if value is not None}
    others = ("limit", "newest", "after", "before", "words")
    equal = {name: value for name, value in given.items() if name not in others}
    conditions, values = [f'"{name}" = ?' for name in equal], list[object](equal.values())
    if words := wanted.get("words"):
        conditions.append("id IN (SELECT value FROM json_each(?))")
        values.append(orjson.dumps(_with_words(connection, words)).decode())
    for name, sign in (("after", ">"), ("before", "<")):
        if name in given:
            conditions.append(f"seq {sign} (SELECT seq FROM rollouts WHERE id = ?)")
            values.append(given[name])
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    most = limit if newest is None else newest
    sql = f"SELECT body FROM rollouts{where} ORDER BY seq {'' if newest is None else 'DESC'} LIMIT ?"
    matching = decode(Rollout, connection.execute(sql, (*values, -1 if most is None else most)))
    return matching if newest is None else matching[::-1][:limit]


def _with_words(connection: sqlite3.Connection, words: Sequence[str]) -> list[str]:
    """Ids of rollouts with a text that has all these words; JSON has them as they are, so nothing is decoded."""
    has_all, asked = " AND ".join(["{} LIKE ?"] * len(words)), [f"%{word}%" for word in words]
    in_data, in_body = (has_all.replace("{}", column) for column in ("data", "body"))
    found = connection.execute(f"SELECT seq FROM pieces WHERE typeof(data) = 'text' AND {in_data}", asked).fetchall()
    calls = connection.execute("SELECT owner, pieces FROM records WHERE pieces IS NOT NULL").fetchall()
    owners = np.repeat([owner for owner, _ in calls], [len(column) // NUMBERS.itemsize for _, column in calls])
    numbers = np.frombuffer(b"".join(column for _, column in calls), NUMBERS)
    of_pieces = np.unique(owners[np.isin(numbers, [number for (number,) in found])])
    rows = connection.execute(
        f"SELECT id FROM rollouts WHERE {in_body} UNION SELECT rollout FROM attempts WHERE seq IN (SELECT value FROM "
        f"json_each(?)) OR seq IN (SELECT owner FROM records WHERE kind IN (?, ?) AND {in_body})",
        (*asked, orjson.dumps(of_pieces.tolist()).decode(), Call.__name__, Attempt.__name__, *asked),
    )
    return [id for (id,) in rows]


def rollout(connection: sqlite3.Connection, prefix: str, where: str) -> Rollout:
    """The only rollout whose id starts with `prefix`, or is `prefix`; errors say `where` it was looked for."""
    rows = connection.execute(
        "SELECT body FROM rollouts WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?",
        (prefix, prefix + "\U0010ffff", _PREFIX_MATCHES_SHOWN),
    )
    matching = decode(Rollout, rows)
    if not matching:
        raise StoreRefusedError(
            f"No rollout in {where} has an id that starts with {prefix!r}. `agl rollouts` lists them."
        )
    if len(matching) > 1 and matching[0].id != prefix:
        more = ", …" if len(matching) == _PREFIX_MATCHES_SHOWN else ""
        raise StoreRefusedError(
            f"Several rollouts in {where} have ids that start with {prefix!r}: "
            f"{', '.join(rollout.id for rollout in matching)}{more}. Name one of them."
        )
    return matching[0]


def attempts(connection: sqlite3.Connection, *rollouts: str) -> list[Attempt]:
    rows = connection.execute(
        "SELECT body FROM json_each(?) AS asked CROSS JOIN attempts ON attempts.rollout = asked.value "
        "CROSS JOIN records ON records.owner = attempts.seq AND records.kind = ? ORDER BY asked.key, attempts.attempt",
        (orjson.dumps(list(dict.fromkeys(rollouts))).decode(), Attempt.__name__),
    )
    return decode(Attempt, rows)


def calls(
    connection: sqlite3.Connection, attempts: Iterable[AttemptKey], ids: Collection[str] | None = None
) -> list[Call]:
    named = "" if ids is None else " AND records.key IN (SELECT value FROM json_each(?))"
    sql = f"SELECT asked.key, body, pieces, arrays {_ASKED}{named} ORDER BY asked.key, records.seq"
    values = () if ids is None else (orjson.dumps([dump_json([id]) for id in ids]).decode(),)
    rows = connection.execute(sql, (_asked(attempts), Call.__name__, *values)).fetchall()
    numbers = {number for _, _, column, _ in rows for number in numbers_in(column)}
    numbered = connection.execute(
        "SELECT pieces.seq, pieces.data FROM json_each(?) AS asked CROSS JOIN pieces ON pieces.seq = asked.value",
        (orjson.dumps(list(numbers)).decode(),),
    )
    pieces: dict[int, Data] = dict(numbered)
    placed = [(place, decode_call(body, column, arrays, pieces)) for place, body, column, arrays in rows]
    return [call for _, call in sorted(placed, key=lambda pair: (pair[0], pair[1].sequence))]


def recorded(connection: sqlite3.Connection, attempts: Iterable[AttemptKey], kind: type[Kept]) -> list[Kept]:
    """Records of any kind but calls, in the order in which they were recorded."""
    sql = f"SELECT body, arrays {_ASKED} ORDER BY records.seq"
    return decode(kind, connection.execute(sql, (_asked(attempts), kind.__name__)))


def _asked(keys: Iterable[AttemptKey]) -> str:
    if isinstance(keys, AttemptKey):  # which is a tuple too
        raise StoreRefusedError(f"A store is asked for several attempts: pass [{keys!r}], not the key alone.")
    return orjson.dumps([[rollout_id, attempt] for rollout_id, attempt in dict.fromkeys(keys)]).decode()


def erase_rollouts(connection: sqlite3.Connection, first_new_piece: int, ids: Sequence[str]) -> int:
    """Remove rollouts, overwrite what they took, and return how many there were; all or nothing.

    Pieces go that no other call has. Pieces from `first_new_piece` on stay, for calls that are not written yet.
    """
    parameters = (orjson.dumps(list(ids)).decode(),)
    their_ids = "(SELECT value FROM json_each(?))"
    their_attempts = f"owner IN (SELECT seq FROM attempts WHERE rollout IN {their_ids})"
    connection.execute("PRAGMA secure_delete = ON")
    try:
        with transaction(connection):
            remembered = "INSERT OR IGNORE INTO erased (time, id) SELECT ?, value FROM json_each(?)"
            connection.execute(remembered, (time.time(), *parameters))
            pieces = _referred_to(connection.execute(f"{_REFERENCES} WHERE {their_attempts}", parameters))
            connection.execute(f"DELETE FROM records WHERE {their_attempts}", parameters)
            connection.execute(f"DELETE FROM attempts WHERE rollout IN {their_ids}", parameters)
            removed = connection.execute(f"DELETE FROM rollouts WHERE id IN {their_ids}", parameters).rowcount
            unused = pieces[pieces < first_new_piece]
            if len(unused):
                unused = np.setdiff1d(unused, _referred_to(connection.execute(_REFERENCES)), assume_unique=True)
            connection.executemany("DELETE FROM pieces WHERE seq = ?", ((number,) for number in unused.tolist()))
            return removed
    finally:
        connection.execute("PRAGMA secure_delete = OFF")


def _referred_to(references: Iterable[tuple[bytes | None]]) -> NDArray[np.int64]:
    """The numbers of pieces in these columns, which may be all of a store."""
    columns = b"".join(column for (column,) in references if column is not None)
    return np.unique(np.frombuffer(columns, dtype=NUMBERS))


def erased(connection: sqlite3.Connection, ids: Iterable[str]) -> set[str]:
    ids_json = orjson.dumps(list(ids)).decode()
    rows = connection.execute("SELECT id FROM erased WHERE id IN (SELECT value FROM json_each(?))", (ids_json,))
    return {id for (id,) in rows}


def ended_before(connection: sqlite3.Connection, mode: Mode, moment: float) -> list[str]:
    rows = connection.execute(
        "SELECT rollouts.id FROM rollouts JOIN attempts ON attempts.rollout = rollouts.id "
        "JOIN records ON records.owner = attempts.seq AND records.kind = ? WHERE rollouts.mode = ? AND "
        "rollouts.state = ? GROUP BY rollouts.id HAVING max(json_extract(records.body, '$.ended')) < ? "
        "ORDER BY rollouts.seq",
        (Attempt.__name__, mode.value, RolloutState.DONE.value, moment),
    )
    return [id for (id,) in rows]
