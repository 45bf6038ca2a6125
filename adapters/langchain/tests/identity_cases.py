"""What the tests of identity share: a question, and a model server that waits for several requests."""

from __future__ import annotations

import threading
from typing import Any

from agl_core.testing.scripts import Received, Step

QUESTION = {"messages": [{"role": "user", "content": "hello"}]}


def overlapping(server: Any, parties: int) -> None:
    """No request is answered before `parties` of them have arrived."""
    barrier, reply = threading.Barrier(parties), server.answer

    def script(received: Received) -> Step:
        barrier.wait(20)
        return reply(received)

    server.answer = script
