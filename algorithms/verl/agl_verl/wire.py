"""What crosses between a run and its veRL driver, as bytes. Imports neither veRL nor torch.

The run writes commands to the driver's standard input, each one line of JSON and `size` bytes of body; the driver
answers each with one line of JSON, which is a result or an error.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict

from agl_core.protocols import PolicySpec, UpdateResult
from agl_core.types import Batch, CreditKind, TransitionKey
from agl_verl.options import VerlOptions

_ARRAYS = tuple(field.name for field in dataclasses.fields(Batch) if field.name not in ("kind", "keys"))


class Settings(BaseModel):
    """The first line on the driver's standard input."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    options: VerlOptions
    policy: str
    """Its name, which is the served model's too."""
    spec: PolicySpec
    seed: int
    deterministic: bool
    updates: int
    run_dir: Path
    plugin_files: tuple[Path, ...]
    api_key: str


class Ready(BaseModel):
    """The driver's first line: where it serves, or why it does not."""

    urls: tuple[str, ...] = ()
    context_length: int = 0
    error: str | None = None


class Command(BaseModel):
    """What the driver is to do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    do: Literal["update", "save", "load"]
    folder: Path | None = None
    """Of save and load."""
    size: int = 0
    """Bytes that follow: of an update its `UpdateRequest`."""

    def encode(self, body: bytes = b"") -> bytes:
        """The command's line and its body."""
        return self.model_copy(update={"size": len(body)}).model_dump_json().encode() + b"\n" + body


class Answer(BaseModel):
    """What became of a command."""

    value: dict[str, Any] = {}
    error: str | None = None
    kind: str = ""
    """The error's class."""


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """The body of an update."""

    algorithm: str
    options: Mapping[str, Any]
    batch: Batch

    def encode(self) -> bytes:
        """A numpy archive (no pickle): the batch's arrays, and the rest as JSON in `header`."""
        header = {
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
        return cls(header["algorithm"], header["options"], batch)


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
