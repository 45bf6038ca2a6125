"""Writes docs/verl-parity.md: `python algorithms/verl/tests/make_parity.py`, in the environment of `make test-verl`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
INTRODUCTION = """# The two engines make the same update

The same algorithm code runs under the torch engine and under veRL. This page is written by
`algorithms/verl/tests/make_parity.py`, which makes two updates in a row, from the weights of `examples/calc/policy`.
What is trained on is recorded episodes (`recorded.py`) through agl's own bound on staleness, credit and batching:
three groups of three rollouts of two to four calls, ragged, with forced tokens, answered by two versions of the
policy, each group with a weight of its own. One rollout is too old and leaves its group; calls of a second agent are
not trained, and what they earned is in the return of the first; a log-probability is not finite, a token is none of
the model's, a transition is longer than the context. The batch goes once through the torch engine's trainer, and once
through veRL's own training workers (FSDP2 over gloo, on a CPU, float32) with pad rows among the others.
`make test-verl` holds the two to the limits.

"""
HEADER = """| algorithm | advantages: difference | loss: difference | change: cosine | change: norm, relative |
|---|---|---|---|---|
| *limit* | 1e-6 | 1e-5 | at least 0.9999 | 1e-3 |
"""
NOTE = """
The change of PPO's critic is compared like the policy's; the row has the worse of the two, as it has of both updates.
The same transitions were left out for the same reasons, and weights agree as closely as advantages.

What is left out weighs nothing: with other tokens and log-probabilities in all calls that are stale, of the untrained
agent, dropped, unknown or too long, either engine moves the parameters by the same, to the last bit; with others in the
calls that are trained on it does not. Under veRL the same holds for the tokens of pad rows, and of rows without weight
among others (`live_parity.py`).
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
