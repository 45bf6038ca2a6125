"""Attaching that can be undone, so that each cell finds the process as a user's program would."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import pytest

import agl_core
from agl_core.protocols import Adapter


@contextlib.contextmanager
def attached_to(adapters: Sequence[Adapter] | None) -> Iterator[None]:
    """These adapters attached, or all that are installed; AssertionError if one of them fails.

    Requests are stamped in any case. What LangChain's and OpenTelemetry's adapters hook in is taken out again; the
    others report to an attempt that runs, and to nobody else.
    """
    langchain = sys.modules.get("langchain_core.tracers.context")
    opentelemetry = sys.modules.get("opentelemetry.sdk.trace")
    with pytest.MonkeyPatch.context() as patch:
        if langchain:
            patch.setattr(langchain, "_configure_hooks", list(langchain._configure_hooks))
        if opentelemetry:
            patch.setattr(opentelemetry.TracerProvider, "__init__", opentelemetry.TracerProvider.__init__)
        attachment = agl_core.attach(adapters)
        try:
            assert attachment.failed == {}
            yield
        finally:
            attachment.detach()
            for name, installing in (("agl_langchain.callback", "attach"), ("agl_otel.watching", "watch")):
                if name in sys.modules:
                    getattr(sys.modules[name], installing).cache_clear()
