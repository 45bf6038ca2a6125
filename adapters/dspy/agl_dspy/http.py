"""The HTTP client that DSPy brings since 3.4: its requests to the Lightning Server are stamped like those of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from agl_core.capture.attach.methods import wrap_once
from agl_core.capture.attach.requests import Outgoing, Stamping, goes_to_the_server

_CLIENT = "dspy._vendor.lm15.transports"
"""DSPy before 3.4 sends through libraries that agl knows."""


def watch_client() -> None:
    """Wrap the sync and the async transport, if there are any; calling it again changes nothing."""
    for module, transport, method, wrap in (
        ("_sync", "StdlibTransport", "stream", _stamped),
        ("_async", "StdlibAsyncTransport", "_do_stream", _stamped_async),
    ):
        found = _found(f"{_CLIENT}.{module}")
        if found is not None:
            wrap_once(getattr(found, transport), method, wrap)


def _found(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return None


def _stamped(send: Callable[..., Any]) -> Callable[..., Any]:
    def stamped_send(transport: Any, request: Any) -> Any:
        with _stamp(request) as stamped:
            return send(transport, stamped)

    return stamped_send


def _stamped_async(send: Callable[..., Any]) -> Callable[..., Any]:
    async def stamped_send(transport: Any, request: Any) -> Any:
        with _stamp(request) as stamped:
            return await send(transport, stamped)

    return stamped_send


@contextmanager
def _stamp(request: Any) -> Iterator[Any]:
    """The request as it is to be sent; the call lasts until this ends, with the head of the reply."""
    if not goes_to_the_server(request.url):
        yield request
        return
    headers = {name.lower(): value for name, value in request.headers}
    with Stamping().stamped(Outgoing(request.method, headers)):
        yield dataclasses.replace(request, headers=list(headers.items()))
