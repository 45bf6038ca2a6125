"""The torch engine and veRL compared (`tests/support/engine_parity.py`).

`python -m algorithms.verl.tests.parity`, in the environment of `make test-verl`, writes docs/parity.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agl_core.types import Batch
from tests.support.engine_parity import CASES, STEPS, Case, Distance, compared, write

from . import verl_bench

POLICY = Path(__file__).resolve().parents[3] / "examples" / "calc" / "policy"
VOCABULARY = 512


def distance(model: Path, case: Case) -> Distance:
    """Make the updates with both engines, from the same weights."""
    by_torch = verl_bench.TorchBench(model, case.name, case.options)
    by_verl = verl_bench.VerlBench(model, case.name, case.options)
    return compared(*((by_torch.update(batch), by_verl.update(batch, VOCABULARY)) for batch in _batches(case)))


def distance_of_rows(model: Path, case: Case) -> Distance:
    """Make veRL's updates with a row for each call, and with a row for calls that continue each other."""
    return _distance_of(model, case, {"joins_calls": False})


def distance_of_scoring(model: Path, case: Case) -> Distance:
    """Make veRL's updates with old log-probabilities from a pass of their own, and as in a run."""
    return _distance_of(model, case, {"scores_first": True})


def _distance_of(model: Path, case: Case, other: Mapping[str, bool]) -> Distance:
    ways = [verl_bench.VerlBench(model, case.name, case.options, **settings) for settings in (other, {})]
    return compared(*(tuple(way.update(batch, VOCABULARY) for way in ways) for batch in _batches(case)))  # type: ignore[arg-type]


def _batches(case: Case) -> list[Batch]:
    return [
        verl_bench.recorded_batch(VOCABULARY, case.kind, seed=number, step=step) for number, step in enumerate(STEPS)
    ]


def main() -> None:
    measures = {"both engines": distance, "a row for each call, and for a conversation": distance_of_rows}
    write({name: {case: measure(POLICY, CASES[case]) for case in CASES} for name, measure in measures.items()})


if __name__ == "__main__":
    main()
