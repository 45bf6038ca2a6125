"""Streams of replies that an agent leaves before their end: it did not get what the model said, so that must not count.

The whole reply is on its way at once, and often in the client's machine before the agent has read a word. Only the
client's side can know how much of it was handed to the agent, so events are handed on one by one.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

from agl_core.capture.context import current_attempt
from agl_core.capture.recording import Recording
from agl_core.capture.reports import report_problem
from agl_core.wire.headers import HEADER_CALL

_END = b"\n\n"
_LAST = 2
"""Events at a stream's end that carry no part of the reply: its usage, and its end."""


class _Handed:
    """How much of a stream was handed to the agent."""

    def __init__(self, call: str, size: int, recording: Recording) -> None:
        self._call, self._missing, self._recording = call, size, recording
        self._is_over = False
        self._rest = b""

    def events(self, data: bytes) -> Iterator[bytes]:
        """The events in what has come, one by one."""
        self._missing -= len(data)
        self._rest += data
        while self._rest:
            event, found, rest = self._rest.partition(_END)
            if not found and self._missing > 0:
                return
            self._rest = rest
            yield event + found

    def close(self) -> None:
        """The agent reads no more."""
        if not self._is_over:
            self._is_over = True
            if self._missing > 0 or self._rest.count(_END) > _LAST:
                self._recording.undelivered(self._call)


def watch_stream(library: ModuleType, response: Any) -> Any:
    """The response; if its agent closes it before it has read the reply, that is reported."""
    return _watched(response, _sync_stream(library))


def watch_stream_async(library: ModuleType, response: Any) -> Any:
    """The same for an asynchronous client."""
    return _watched(response, _async_stream(library))


def _watched(response: Any, kind: Any) -> Any:
    try:
        active, call = current_attempt(), response.headers.get(HEADER_CALL)
        size = response.headers.get("content-length", "")
        if active is not None and call and size.isdigit() and not response.is_closed:
            response.stream = kind(response.stream, _Handed(call, int(size), active.recording))
    except Exception as error:
        report_problem("Watching a stream", error)
    return response


@functools.cache
def _sync_stream(library: ModuleType) -> Any:
    class WatchedStream(library.SyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, stream: Any, handed: _Handed) -> None:
            self._stream, self._handed = stream, handed

        def __iter__(self) -> Iterator[bytes]:
            for data in self._stream:
                yield from self._handed.events(data)

        def close(self) -> None:
            self._handed.close()
            self._stream.close()

    return WatchedStream


@functools.cache
def _async_stream(library: ModuleType) -> Any:
    class WatchedAsyncStream(library.AsyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, stream: Any, handed: _Handed) -> None:
            self._stream, self._handed = stream, handed

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for data in self._stream:
                for event in self._handed.events(data):
                    yield event

        async def aclose(self) -> None:
            self._handed.close()
            await self._stream.aclose()

    return WatchedAsyncStream
