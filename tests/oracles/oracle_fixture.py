"""The committed fixture: batches, and what the oracles made of them. One JSON record to a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .oracle_batches import Batch, Transition
from .oracle_cases import Case, Outputs, every_case

PATH = Path(__file__).with_name("fixture.jsonl")
SEEDS = (1, 2)
"""Of the batches in the fixture, for each case."""


@dataclass(frozen=True)
class Fixture:
    """As read from the file."""

    made_with: Mapping[str, str]
    """Versions of the oracles' distributions."""
    batches: Mapping[str, Batch]
    """By `batch_name`."""
    outputs: Mapping[tuple[str, str], Outputs]
    """The oracles', by case and batch."""


def batch_name(case: Case, seed: int) -> str:
    return f"{case.kind}-{seed}"


def from_oracles(made_with: Mapping[str, str]) -> Fixture:
    """Asks the real functions, which must be installed."""
    batches: dict[str, Batch] = {}
    outputs: dict[tuple[str, str], Outputs] = {}
    for case in every_case():
        for seed in SEEDS:
            name = batch_name(case, seed)
            batches[name] = case.batch(seed)
            outputs[case.name, name] = case.theirs(batches[name])
    return Fixture(made_with, batches, outputs)


def read() -> Fixture:
    made_with, *records = (json.loads(line) for line in PATH.read_text().splitlines())
    return Fixture(
        made_with["made_with"],
        {it["batch"]: Batch(tuple(map(_transition, it["transitions"]))) for it in records if "transitions" in it},
        {(it["case"], it["batch"]): _tensors(it["outputs"]) for it in records if "case" in it},
    )


def write(fixture: Fixture) -> None:
    PATH.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in _records(fixture)))


def _records(fixture: Fixture) -> Iterator[dict[str, Any]]:
    yield {"made_with": dict(fixture.made_with)}
    for name, batch in fixture.batches.items():
        yield {"batch": name, "transitions": [asdict(row) for row in batch.transitions]}
    for (case, name), outputs in fixture.outputs.items():
        rounded = {key: _rounded(value) for key, value in outputs.items()}
        yield {"case": case, "batch": name, "outputs": rounded}


def _rounded(value: Tensor) -> Any:
    """12 digits: more than is compared."""
    numbers = [float(f"{number:.12g}") for number in value.reshape(-1).tolist()]
    return numbers if value.dim() else numbers[0]


def _transition(record: Mapping[str, Any]) -> Transition:
    return Transition(**{key: tuple(value) if isinstance(value, list) else value for key, value in record.items()})


def _tensors(outputs: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: torch.tensor(value, dtype=torch.float64) for key, value in outputs.items()}
