"""Heartbeats: what tells the server that a worker still runs its attempts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from agl_core.client.http import BlockingClient, UnreachableError
from agl_core.client.link import Link
from agl_core.errors import ServerError
from agl_core.types import AttemptKey
from agl_core.wire.workers import HEARTBEAT, MAX_LEASES, HeartbeatRequest, HeldAttempt, Lease

logger = logging.getLogger(__name__)

_TIMEOUT = 10.0
_BEFORE_FIRST_LEASE = 5.0
"""Seconds between heartbeats of a worker that the server has not told how often it wants them."""


class Heartbeats:
    """Sends heartbeats for the attempts that are held, if any, from a thread and an HTTP client of its own.

    Those that name none tell the server that this worker sends heartbeats: what it is lent in a reply that never
    arrives is then soon lost, and tried again. An agent that blocks the worker's event loop loses no lease. `told` is
    called in that thread with the attempts that no longer count, and whether the run is over.
    """

    def __init__(
        self, base_url: str, key: str, worker: str, link: Link, told: Callable[[Collection[AttemptKey], bool], None]
    ) -> None:
        self._base_url, self._key, self._worker, self._link, self._told = base_url, key, worker, link, told
        self._lock = threading.Lock()
        self._held: dict[AttemptKey, HeldAttempt] = {}
        self._due = threading.Event()
        self._stopped = False
        self._interval = _BEFORE_FIRST_LEASE
        self._thread = threading.Thread(target=self._send_forever, daemon=True, name="agl-heartbeats")

    def start(self) -> None:
        """Send the first one at once."""
        self._due.set()
        self._thread.start()

    def stop(self) -> None:
        """Send no more; does not wait for one under way."""
        self._stopped = True
        self._due.set()

    def hold(self, lease: Lease) -> None:
        """Send for this one too, the first time at once, then as often as it says."""
        held = HeldAttempt(rollout=lease.rollout, attempt=lease.attempt, secret=lease.secret)
        with self._lock:
            self._held[AttemptKey(lease.rollout, lease.attempt)] = held
        self._interval = lease.heartbeat
        self._due.set()

    def release(self, key: AttemptKey) -> None:
        """The attempt has ended."""
        with self._lock:
            self._held.pop(key, None)

    def _send_forever(self) -> None:
        with BlockingClient(self._base_url, self._key, _TIMEOUT) as client:
            while not self._stopped:
                self._due.wait(self._interval)
                self._due.clear()
                with self._lock:
                    held = list(self._held.values())
                if not self._stopped:
                    self._send(client, held)

    def _send(self, client: BlockingClient, held: list[HeldAttempt]) -> None:
        for start in range(0, max(len(held), 1), MAX_LEASES):
            self._send_some(client, held[start : start + MAX_LEASES])

    def _send_some(self, client: BlockingClient, held: list[HeldAttempt]) -> None:
        try:
            reply = client.ask(HEARTBEAT, HeartbeatRequest(worker=self._worker, attempts=held))
        except UnreachableError as error:
            self._link.failed(self, error)
            return
        except ServerError as error:
            logger.debug("A heartbeat was refused, as the next lease will be: %s", error)
            return
        self._link.worked(self)
        if reply.lost or reply.closed:
            self._told([AttemptKey(each.rollout, each.attempt) for each in reply.lost], reply.closed)
