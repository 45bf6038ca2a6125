"""The components that real use adds: redactors and release checks, and the decorators that make them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

from agl_core.decorators import component
from agl_core.kinds import Kind

Redactor: TypeAlias = Callable[[str], str]
"""Takes out of a text of real use what may not be stored."""


@dataclass(frozen=True)
class Release:
    """A version that may be served, beside the one that is."""

    policy: str
    step: int
    """Of its checkpoint."""
    weights: Path
    """A folder that transformers, or peft for an adapter, loads."""
    metrics: Mapping[str, float]
    """Of its evaluation (docs/metrics.md), for instance `eval/greedy/reward/mean`."""
    incumbent: int
    """The version that is served."""
    incumbent_metrics: Mapping[str, float]


ReleaseCheck: TypeAlias = Callable[[Release], str | Awaitable[str | None] | None]
"""Says what speaks against serving a version; None: nothing."""

REDACTOR = Kind("redactor")
RELEASE_CHECK = Kind("release check")

CheckFunction = TypeVar("CheckFunction", bound=Callable[..., str | Awaitable[str | None] | None])
RedactFunction = TypeVar("RedactFunction", bound=Callable[..., str])


@overload
def release_check(function: CheckFunction) -> CheckFunction: ...
@overload
def release_check(*, name: str) -> Callable[[CheckFunction], CheckFunction]: ...
def release_check(function: Any = None, *, name: str | None = None) -> Any:
    """Make `function(release, *, settings…) -> str | None` a check before a version is served; it may be async.

    It says what speaks against the version (a `Release`), or None. What it raises does too.
    """
    return component(function, RELEASE_CHECK, name)


@overload
def redactor(function: RedactFunction) -> RedactFunction: ...
@overload
def redactor(*, name: str) -> Callable[[RedactFunction], RedactFunction]: ...
def redactor(function: Any = None, *, name: str | None = None) -> Any:
    """Make `function(text, *, settings…) -> str` a redactor: it returns the text of a session as it may be stored.

    A call on whose texts it raises is answered, and not recorded.
    """
    return component(function, REDACTOR, name)
