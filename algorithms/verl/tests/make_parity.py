"""Writes docs/verl-parity.md: `python algorithms/verl/tests/make_parity.py`, in the environment of `make test-verl`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
INTRODUCTION = """# The two engines make the same update

The same algorithm code runs under the torch engine and under veRL. This page is written by
`algorithms/verl/tests/make_parity.py`, which makes two updates in a row, from the weights of `examples/calc/policy`, on
recorded batches: three groups of three rollouts of one to four calls, ragged, with forced tokens, two policy versions,
one transition whose log-probability is not finite and one longer than the context. It makes them once with the torch
engine's trainer, and once with veRL's own training workers (FSDP2 over gloo, on a CPU, float32) with pad rows among the
others. `make test-verl` holds the two to the limits.

"""
HEADER = """| algorithm | advantages: difference | loss: difference | change: cosine | change: norm, relative |
|---|---|---|---|---|
| *limit* | 1e-6 | 1e-5 | at least 0.9999 | 1e-3 |
"""
NOTE = """
The change of PPO's critic is compared like the policy's; the row has the worse of the two, as it has of both updates.
The same transitions were left out for the same reasons, and weights agree as closely as advantages.
"""


def main() -> None:
    sys.path.insert(0, str(HERE))
    import parity

    rows = []
    for name, case in parity.CASES.items():
        found = parity.distance(ROOT / "examples" / "calc" / "policy", case)
        if not found.same_dropped or found.weights > 1e-6:
            raise SystemExit(f"{name}: the engines left out or weighted other transitions: {found}")
        rows.append(
            f"| {name} | {found.advantages:.1e} | {found.loss:.1e} | 1 - {1 - found.cosine:.1e} | {found.norm:.1e} |\n"
        )
    (ROOT / "docs" / "verl-parity.md").write_text(INTRODUCTION + HEADER + "".join(rows) + NOTE, encoding="utf-8")


if __name__ == "__main__":
    main()
