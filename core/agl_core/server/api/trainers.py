"""The routes of a remote trainer: to run rollouts against its engine, and to keep and give back records."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from starlette.routing import Route

from agl_core.errors import StoreRefusedError
from agl_core.server.api.routes import emptily, route
from agl_core.server.errors import ApiError
from agl_core.server.keys import Keys
from agl_core.server.rollouts.current_run import CurrentRun
from agl_core.store.interface import Record
from agl_core.store.packing import answer, pack, unpack
from agl_core.types import Rollout
from agl_core.wire import trainers as wire
from agl_core.wire.body import Empty

_PUTS_AT_ONCE = 4
"""Writes of which the server keeps parts; of more, it keeps those whose parts came last."""


def trainer_routes(keys: Keys, run: CurrentRun) -> list[Route]:
    """What a trainer asks, whose run this is."""
    records = _Records(run)

    async def begin(body: wire.BeginRequest) -> wire.BeginReply:
        reply = await run.begin(body)
        records.forget_parts()
        return reply

    async def enqueue(body: wire.EnqueueRequest) -> None:
        rollouts: list[Rollout] = []
        for record in unpack(body.rollouts):
            if not isinstance(record, Rollout):
                raise StoreRefusedError(f"Only rollouts can be run, not {type(record).__name__}.")
            run.check_run(record.run)
            run.check_current(record.restart)
            rollouts.append(record)
        await run.queue.enqueue(rollouts)

    async def done(body: wire.DoneRequest) -> wire.PackedRecords:
        return pack(await run.queue.done(body.ids, body.wait))

    async def cancel(body: wire.CancelRequest) -> None:
        run.check_not_superseded(body.restart)
        await run.queue.cancel(body.ids)

    async def activity(body: Empty) -> wire.Activity:
        return await run.activity()

    return [
        route(wire.BEGIN, keys, begin),
        route(wire.FINISH, keys, emptily(run.finish)),
        route(wire.SERVE, keys, emptily(run.serve)),
        route(wire.PUBLISH, keys, emptily(run.publish)),
        route(wire.ENQUEUE, keys, emptily(enqueue)),
        route(wire.DONE, keys, done),
        route(wire.CANCEL, keys, emptily(cancel)),
        route(wire.PUT, keys, emptily(records.put)),
        route(wire.PUT_PART, keys, emptily(records.put_part)),
        route(wire.WRITE_PARTS, keys, emptily(records.write_parts)),
        route(wire.QUERY, keys, records.query),
        route(wire.ACTIVITY, keys, activity),
    ]


class _Records:
    """Writes and reads records, also those that come in parts because one request cannot carry them."""

    def __init__(self, run: CurrentRun) -> None:
        self._run, self._store = run, run.store
        self._puts: OrderedDict[str, dict[int, Sequence[Record]]] = OrderedDict()

    async def put(self, body: wire.PutRequest) -> None:
        records = unpack(body.records)
        self._run.check_not_superseded(body.restart)
        await self._store.put(*records)

    async def put_part(self, body: wire.RecordsPart) -> None:
        """Keep a part; the same number again replaces it."""
        self._run.check_not_superseded(body.restart)
        self._puts.setdefault(body.put, {})[body.number] = unpack(body.records)
        self._puts.move_to_end(body.put)
        if len(self._puts) > _PUTS_AT_ONCE:
            self._puts.popitem(last=False)

    async def write_parts(self, body: wire.PartsRequest) -> None:
        """Write the records of all parts. ApiError 409 if one is missing, or a later trainer has begun."""
        self._run.check_not_superseded(body.restart)
        parts = self._puts.get(body.put, {})
        missing = [number for number in range(body.count) if number not in parts]
        if missing:
            raise ApiError(
                409,
                f"Part {missing[0]} of {body.count} of these records is not here: the server was restarted, or has "
                f"written them. Send all parts again.",
                code="parts_missing",
            )
        await self._store.put(*(record for number in range(body.count) for record in parts[number]))
        self._puts.pop(body.put, None)

    def forget_parts(self) -> None:
        """The trainer that sent them is gone."""
        self._puts.clear()

    async def query(self, body: wire.StoreQuery) -> wire.PackedRecords:
        return pack(await answer(self._store, body.root))
