"""Writes docs/verl-parity.md: `python -m algorithms.verl.tests.make_parity`, in the environment of `make test-verl`."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
INTRODUCTION = """# The two engines make the same update

The same algorithm code runs under the torch engine and under veRL. This page is written by
`algorithms/verl/tests/make_parity.py`, which makes two updates in a row, from the weights of `examples/calc/policy`:
those of the first and the third of four training steps, with a step size that falls along a cosine. The engines train
on recorded episodes (`recorded.py`), which go through agl's own bound on staleness, credit and batching: three ragged
groups of three rollouts of two to four calls, with forced tokens, answered by two versions of the policy. Each group
has its own weight. One rollout is too old and leaves its group. Calls of a second agent are not trained on; what they
earned is in the return of the first agent. One log-probability is not finite, one token is not in the model's
vocabulary, and one transition is longer than the context. The batch goes once through the torch engine's trainer, and
once through veRL's own training workers (FSDP2 over gloo, on a CPU, float32), with pad rows among the others. The
workers are made of the configuration that the engine composes of a run's settings. `make test-verl` checks that the
limits hold.

"""
HEADER = """| algorithm | advantages: difference | loss: difference | change: cosine | change: norm, relative |
|---|---|---|---|---|
| *limit* | 1e-6 | 1e-5 | at least 0.9999 | 1e-3 |
"""
NOTE = """
The change of PPO's critic is compared like the policy's; the row has the worse of the two, and the worse of both
updates. The same transitions were dropped for the same reasons, and weights agree as closely as advantages.

Two passes in three minibatches have a KL to the first weights, with beta = 0.001. With 0.04 the changes of the weights
agree as closely (cosine 1 - 1.3e-9), the losses to 1.8e-5. That is rounding: on these random tokens the penalty grows
exponentially with the distance from the first weights. A change of the last bit of the weights before the update moves
the torch engine's own loss by 3e-6 to 9e-5 (three changes, two updates each), and by at most 6e-7 in one pass.

Through Ray and TransferQueue, with two workers and two minibatches, two updates of PPO, of REINFORCE++ and of GRPO with
a KL are within the same limits (`live_engine.py`; of the critic, its loss and the advantages that its values
make). After each exchange replies have the log-probabilities of the new weights to 1e-5, also from a vLLM replica of
two workers.

What is dropped weighs nothing: with other tokens and log-probabilities in all calls that are stale, of the untrained
agent, dropped, unknown or too long, each engine changes the parameters by exactly the same, to the last bit; with other
tokens in the calls that are trained on it does not. Under veRL the same holds for the tokens of pad rows, and for rows
without weight among others (`live_parity.py`).
"""


def main() -> None:
    from . import parity

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
