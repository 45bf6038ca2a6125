"""The ways to observe an agent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.tracers import context as langchain_context
from langchain_openai.chat_models import _client_utils
from running_servers import attempt_maker, scripted_server  # noqa: F401

import agl_core
import agl_langchain
from agl_langchain import callback
from agl_server.testing import no_problems  # noqa: F401


@pytest.fixture(autouse=True)
def new_clients() -> None:
    """LangChain shares the connections of all clients of one address; another test's server may have had this port.

    Those of an async client belong to an event loop that is closed.
    """
    for cached in (_client_utils._cached_sync_httpx_client, _client_utils._cached_async_httpx_client):
        cached.cache_clear()


@pytest.fixture
def seen_by_agl() -> Iterator[None]:
    """Prepare as a worker does before it loads an agent."""
    attachment = agl_core.attach([])
    yield
    attachment.detach()


@pytest.fixture
def attached() -> None:
    agl_core.attach()


@pytest.fixture(autouse=True)
def detached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what attaches in a test."""
    monkeypatch.setattr(langchain_context, "_configure_hooks", list(langchain_context._configure_hooks))
    yield
    agl_core.attach([]).detach()
    callback.attach.cache_clear()


@pytest.fixture(params=["callback", "attach"])
def config(request: pytest.FixtureRequest, seen_by_agl: None) -> dict[str, Any]:
    """The callbacks that the user passes to the agent, in each way to observe it; every way has to see the same."""
    if request.param == "attach":
        request.getfixturevalue("attached")
    return {} if request.param == "attach" else {"callbacks": [agl_langchain.AglCallback()]}
