"""Instrumenting the OpenAI client for a while."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import openai.resources

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


@contextlib.contextmanager
def instrumenting() -> Iterator[Callable[[Any, TracerProvider], None]]:
    """What instruments the client with an instrumentor; at the end all of it is undone.

    Instrumentors leave some of what they patched: of OpenLLMetry's, `create` and `parse` of the async resources.
    """
    before = resource_methods()
    used: list[Any] = []

    def instrument(kind: Any, provider: TracerProvider) -> None:
        used.append(kind())
        used[-1].instrument(tracer_provider=provider)

    try:
        yield instrument
    finally:
        for each in reversed(used):
            each.uninstrument()
        for (kind, name), value in before.items():
            if vars(kind).get(name) is not value:
                setattr(kind, name, value)


def resource_methods() -> dict[tuple[type, str], Any]:
    """What the classes of the client that make requests have, as it is now."""
    found = pkgutil.walk_packages(openai.resources.__path__, "openai.resources.")
    modules = [importlib.import_module(each.name) for each in found]
    kinds = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    return {
        (kind, name): value
        for kind in kinds
        if kind.__module__.startswith("openai.resources.")
        for name, value in vars(kind).items()
        if not name.startswith("__")
    }
