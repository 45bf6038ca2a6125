"""What crosses between a run and its engine process, as bytes. Imports no torch: the run's side uses it too."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict

from agl_core.protocols import PolicySpec, UpdateResult
from agl_core.types import Batch, CreditKind, TransitionKey
from agl_torch.options import TorchOptions

_ARRAYS = tuple(field.name for field in dataclasses.fields(Batch) if field.name not in ("kind", "keys"))


class Settings(BaseModel):
    """The first line on the engine process's standard input."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    options: TorchOptions
    policies: dict[str, PolicySpec]
    seed: int
    deterministic: bool
    updates: int = 0
    plugin_files: tuple[Path, ...]
    api_key: str
    """For the OpenAI-compatible routes."""
    control_key: str
    """For the routes below /engine."""


class Ready(BaseModel):
    """The one line on its standard output: where it listens, or why it does not."""

    port: int = 0
    context_length: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """The body of POST /engine/update."""

    policy: str
    algorithm: str
    options: Mapping[str, Any]
    batch: Batch

    def encode(self) -> bytes:
        """A numpy archive (no pickle): the batch's arrays, and the rest as JSON in `header`."""
        header = {
            "policy": self.policy,
            "algorithm": self.algorithm,
            "options": dict(self.options),
            "kind": self.batch.kind.value,
            "keys": [list(key) for key in self.batch.keys],
        }
        arrays = {name: getattr(self.batch, name) for name in _ARRAYS}
        buffer = io.BytesIO()
        np.savez(buffer, header=np.frombuffer(orjson.dumps(header), dtype=np.uint8), **arrays)
        return buffer.getvalue()

    @classmethod
    def decode(cls, body: bytes) -> UpdateRequest:
        with np.load(io.BytesIO(body), allow_pickle=False) as archive:
            header = orjson.loads(archive["header"].tobytes())
            arrays = {name: archive[name] for name in _ARRAYS}
        keys = tuple(TransitionKey(*key) for key in header["keys"])
        batch = Batch(**arrays, kind=CreditKind(header["kind"]), keys=keys)
        return cls(header["policy"], header["algorithm"], header["options"], batch)


def encode_result(result: UpdateResult) -> dict[str, Any]:
    """An update's result as JSON values; floats survive exactly."""
    return {
        "version": result.version,
        "metrics": dict(result.metrics),
        "advantage": result.advantage_N.tolist(),
        "weight": result.weight_N.tolist(),
        "dropped": list(result.dropped),
    }


def decode_result(value: Mapping[str, Any]) -> UpdateResult:
    """What `encode_result` gave."""
    return UpdateResult(
        version=value["version"],
        metrics=value["metrics"],
        advantage_N=np.array(value["advantage"], dtype=np.float64),
        weight_N=np.array(value["weight"], dtype=np.float64),
        dropped=tuple(value["dropped"]),
    )
