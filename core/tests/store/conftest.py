"""Records to store, and how to compare them exactly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.types import AttemptKey, Call


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(path) as opened:
        yield opened


@pytest.fixture
def make_call() -> Callable[..., Call]:
    def make_call(id: str, rollout: str = "r", **changes: Any) -> Call:
        fields = {"request": {"model": "default", "messages": [{"role": "user", "content": id}]}, **changes}
        return make.call(rollout=rollout, id=id, **fields)

    return make_call


@pytest.fixture
def calls_of() -> Callable[..., Any]:
    async def read(store: SqliteStore, *rollouts: str) -> dict[str, Call]:
        return {call.id: call for call in await store.calls([AttemptKey(rollout, 0) for rollout in rollouts])}

    return read


@pytest.fixture(scope="session")
def exactly() -> Callable[[Any], Any]:
    """A value that is equal for equal records only: types of arrays and numbers, signs of zeros, order of keys."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return [str(value.dtype), list(value.shape), value.tolist()]
        if dataclasses.is_dataclass(value):
            return [type(value).__name__, *(plain(getattr(value, field.name)) for field in dataclasses.fields(value))]
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value

    return lambda value: json.dumps(plain(value))
