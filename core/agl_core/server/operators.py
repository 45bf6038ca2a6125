"""What a trainer apart asks of the server: to run rollouts against its engine, and to keep and give back records."""

from __future__ import annotations

from starlette.requests import Request

from agl_core.errors import StoreRefusedError
from agl_core.server.operations import Operations, Right, operation, while_connected
from agl_core.server.parts import Parts
from agl_core.server.served_run import ServedRun
from agl_core.store.packing import pack, unpack
from agl_core.store.questions import answer
from agl_core.types import Rollout
from agl_core.wire.operators import (
    Accepted,
    BeginReply,
    BeginRequest,
    CancelRequest,
    DoneRequest,
    EnqueueRequest,
    FinishRequest,
    PackedRecords,
    PartsRequest,
    RecordsPart,
    Registration,
    StoreQuery,
    VersionsRequest,
)

_SUPERSEDED = {409: "Another trainer has begun a later incarnation."}
_KNOWN = {409: "Another rollout has that id, the run is over, or another trainer has begun a later incarnation."}
_NO_SUCH = {404: "One of the rollouts was never added."}
_TAKEN = {409: "The server serves another run."}
_MISSING = {409: "A part is not here: send all of them again."}


class Operators:
    """The operators' routes."""

    def __init__(self, run: ServedRun) -> None:
        self._run, self._parts = run, Parts()

    @property
    def operations(self) -> Operations:
        """What is served."""
        right = Right.OPERATOR
        return (
            operation("POST", "/runs", right, BeginRequest, BeginReply, self._begin, _TAKEN),
            operation("POST", "/runs/finish", right, FinishRequest, Accepted, self._finish, _SUPERSEDED),
            operation("PUT", "/upstream", right, Registration, Accepted, self._register, _SUPERSEDED),
            operation("PUT", "/versions", right, VersionsRequest, Accepted, self._publish, _SUPERSEDED),
            operation("POST", "/rollouts", right, EnqueueRequest, Accepted, self._enqueue, _KNOWN),
            operation("POST", "/rollouts/done", right, DoneRequest, PackedRecords, self._done, _NO_SUCH),
            operation("POST", "/rollouts/cancel", right, CancelRequest, Accepted, self._cancel),
            operation("POST", "/store/records", right, PackedRecords, Accepted, self._put),
            operation("POST", "/store/parts", right, RecordsPart, Accepted, self._keep),
            operation("POST", "/store/parts/write", right, PartsRequest, Accepted, self._write, _MISSING),
            operation("POST", "/store/query", right, StoreQuery, PackedRecords, self._query),
        )

    async def _begin(self, request: Request, body: BeginRequest) -> BeginReply:
        """Begin the run's next incarnation; what earlier ones left unfinished ends as lost."""
        reply = await self._run.begin(body)
        self._parts.clear()
        return reply

    async def _finish(self, request: Request, body: FinishRequest) -> Accepted:
        """The trainer stops, and perhaps the run is over."""
        await self._run.finish(body)
        return Accepted()

    async def _register(self, request: Request, body: Registration) -> Accepted:
        """Say where the trainer's engine serves, and how to sample; to be said again before it expires."""
        await self._run.serve(body)
        return Accepted()

    async def _publish(self, request: Request, body: VersionsRequest) -> Accepted:
        """Policies were updated."""
        await self._run.publish(body)
        return Accepted()

    async def _enqueue(self, request: Request, body: EnqueueRequest) -> Accepted:
        """Have rollouts run; those that were added before, just as they are, are left alone."""
        rollouts: list[Rollout] = []
        for record in unpack(body.rollouts):
            if not isinstance(record, Rollout):
                raise StoreRefusedError(f"Only rollouts can be run, not {type(record).__name__}.")
            self._run.check_run(record.run)
            self._run.check_current(record.incarnation)
            rollouts.append(record)
        await self._run.queue.enqueue(rollouts)
        return Accepted()

    async def _done(self, request: Request, body: DoneRequest) -> PackedRecords:
        """Which of these rollouts are done; waits for one, and changes nothing."""
        return pack(await while_connected(request, self._run.queue.done(body.ids, body.wait)))

    async def _cancel(self, request: Request, body: CancelRequest) -> Accepted:
        """End rollouts as cancelled; those that are done, or unknown, stay as they are."""
        await self._run.queue.cancel(body.ids)
        return Accepted()

    async def _put(self, request: Request, body: PackedRecords) -> Accepted:
        """Write records, all or none; a record with the key of an earlier one replaces it."""
        await self._run.store.put(*unpack(body))
        return Accepted()

    async def _keep(self, request: Request, body: RecordsPart) -> Accepted:
        """Keep some of the records that are to be written together."""
        self._parts.keep(body.put, body.number, unpack(body.records))
        return Accepted()

    async def _write(self, request: Request, body: PartsRequest) -> Accepted:
        """Write the records of all parts, all or none; a record with the key of an earlier one replaces it."""
        await self._run.store.put(*self._parts.all_of(body.put, body.count))
        self._parts.drop(body.put)
        return Accepted()

    async def _query(self, request: Request, body: StoreQuery) -> PackedRecords:
        """Read records."""
        return pack(await answer(self._run.store, body.root))
