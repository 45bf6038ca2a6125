"""The clients of OpenAI and Anthropic without their waiting."""

from __future__ import annotations

import contextlib
import importlib
import os
import ssl
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def fast_clients() -> Iterator[None]:
    """Clients retry at once, and take no time to be made."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(certificates_read_once())
        for name in ("openai._base_client", "anthropic._base_client"):
            with contextlib.suppress(ModuleNotFoundError):
                client = importlib.import_module(name)
                for delay in ("INITIAL_RETRY_DELAY", "MAX_RETRY_DELAY"):
                    patches.enter_context(mock.patch.object(client, delay, 0.001))
        yield


@contextlib.contextmanager
def certificates_read_once() -> Iterator[None]:
    """A client reads all certificates when it is made, which takes 40 ms: here the first one reads them for all."""
    create, made = ssl.create_default_context, dict[Any, ssl.SSLContext]()

    def once(purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, **given: Any) -> ssl.SSLContext:
        if purpose is not ssl.Purpose.SERVER_AUTH:
            return create(purpose, **given)
        key = (os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"), *sorted(given.items()))
        if key not in made:
            made[key] = create(purpose, **given)
        return made[key]

    with mock.patch.object(ssl, "create_default_context", once):
        yield
