"""Keeps what frameworks send to their vendors on the machine that tests them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

NO_TELEMETRY: Mapping[str, str] = MappingProxyType(
    {
        "CREWAI_DISABLE_TELEMETRY": "true",
        "CREWAI_TRACING_ENABLED": "false",
        "CREWAI_DISABLE_VERSION_CHECK": "true",
        # CrewAI asks no questions about traces.
        "CREWAI_TESTING": "true",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
)
"""For `os.environ`, before a framework is imported: some read it only then."""

_OURS = ("127.0.0.1", "localhost", "::1", None)


@contextlib.contextmanager
def only_this_machine() -> Iterator[None]:
    """Meanwhile the name of another machine is not found; AssertionError at the end if one was looked up."""
    asked: list[Any] = []
    look_up = socket.getaddrinfo

    def watched(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in _OURS:
            asked.append(host)
            raise OSError(f"{host} is another machine")
        return look_up(host, *args, **kwargs)

    with mock.patch.object(socket, "getaddrinfo", watched):
        yield
    assert not asked, f"names of other machines were looked up: {asked}"
