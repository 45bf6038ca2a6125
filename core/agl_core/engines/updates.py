"""One update of a policy as bytes: the request to an engine in another process, and its result."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from agl_core.protocols import UpdateResult
from agl_core.types import Batch, CreditKind, TransitionKey

_ARRAYS = tuple(field.name for field in dataclasses.fields(Batch) if field.name not in ("kind", "keys", "step"))


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """A batch, the policy to train on it, and the algorithm."""

    policy: str
    algorithm: str
    """Its name, as plugins register it."""
    options: Mapping[str, Any]
    """The algorithm's options."""
    batch: Batch

    def encode(self) -> bytes:
        """A numpy archive (no pickle): the batch's arrays, and the rest as JSON in `header`."""
        header = {
            "policy": self.policy,
            "algorithm": self.algorithm,
            "options": dict(self.options),
            "kind": self.batch.kind.value,
            "step": self.batch.step,
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
        batch = Batch(**arrays, kind=CreditKind(header["kind"]), keys=keys, step=header["step"])
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
    return UpdateResult(
        version=value["version"],
        metrics=value["metrics"],
        advantage_N=np.array(value["advantage"], dtype=np.float64),
        weight_N=np.array(value["weight"], dtype=np.float64),
        dropped=tuple(value["dropped"]),
    )
