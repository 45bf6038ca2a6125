"""The committed fixture: what the oracles made of the batches of its seeds. One JSON record to a line.

.venv-oracles/bin/python -m tests.oracles.oracle_fixture    makes it anew, in the environment of `make oracles`
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .oracle_cases import Outputs, every_case

PATH = Path(__file__).with_name("fixture.jsonl")
ORACLES = ("verl", "trl", "torch", "transformers")
SEEDS = (1, 2)
"""Of the batches, for each case."""


@dataclass(frozen=True)
class Fixture:
    """As read from the file."""

    made_with: Mapping[str, str]
    """Versions of the oracles' distributions."""
    outputs: Mapping[tuple[str, int], Outputs]
    """The oracles', by case and seed."""


def made_now() -> Fixture:
    """Asks the real functions, which must be installed."""
    outputs = {(case.name, seed): case.theirs(case.batch(seed)) for case in every_case() for seed in SEEDS}
    return Fixture({name: version(name).split("+")[0] for name in ORACLES}, outputs)


def read() -> Fixture:
    made_with, *records = (json.loads(line) for line in PATH.read_text().splitlines())
    outputs = {
        (record["case"], record["seed"]): {
            name: torch.tensor(value, dtype=torch.float64) for name, value in record["outputs"].items()
        }
        for record in records
    }
    return Fixture(made_with["made_with"], outputs)


def write(fixture: Fixture) -> None:
    records: list[dict[str, Any]] = [{"made_with": dict(fixture.made_with)}]
    for (case, seed), outputs in fixture.outputs.items():
        records.append(
            {"case": case, "seed": seed, "outputs": {key: _rounded(value) for key, value in outputs.items()}}
        )
    PATH.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))


def _rounded(value: Tensor) -> Any:
    """12 digits: more than is compared."""
    numbers = [float(f"{number:.12g}") for number in value.reshape(-1).tolist()]
    return numbers if value.dim() else numbers[0]


if __name__ == "__main__":
    write(made_now())
    print(f"Wrote {PATH}")
