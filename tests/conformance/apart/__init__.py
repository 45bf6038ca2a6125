"""The drivers of frameworks whose pins do not go together: each plays in an environment of its own.

`make test-frameworks` makes these environments. This package imports no framework: here, a driver declares what it
plays, for the page; the module beside it builds the agents.
"""

from __future__ import annotations

from agl_core.testing.adapters.driver import Driver

from .haystack import Haystack
from .llama_index import LlamaIndex

__all__ = ["APART"]

APART: tuple[Driver, ...] = (LlamaIndex(), Haystack())
