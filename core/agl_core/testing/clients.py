"""The clients of OpenAI and Anthropic without their waiting."""

from __future__ import annotations

import contextlib
import functools
import importlib
import ssl
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def fast_clients() -> Iterator[None]:
    """Clients retry at once, and read the certificates, which no test needs, once instead of each."""
    with contextlib.ExitStack() as patches:
        cached = functools.cache(ssl.create_default_context)
        patches.enter_context(mock.patch.object(ssl, "create_default_context", cached))
        for name in ("openai._base_client", "anthropic._base_client"):
            with contextlib.suppress(ModuleNotFoundError):
                client = importlib.import_module(name)
                for delay in ("INITIAL_RETRY_DELAY", "MAX_RETRY_DELAY"):
                    patches.enter_context(mock.patch.object(client, delay, 0.001))
        yield
