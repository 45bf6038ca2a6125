"""What goes into an update of veRL and comes out: rows for TransferQueue, metrics by agl's names.

Conversion alone, no veRL. A row is one transition, ragged: prompt and response as they were sampled. Its key is
`GROUP_ROLLOUT_PLACE`, the form `{uid}_{session}_{index}` that veRL groups by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_core.types import Batch
from agl_verl.losses import TOTAL_LOSS

PAD_PREFIX = "pad"
"""veRL's own pad rows have keys that begin like this."""


@dataclass(frozen=True, slots=True)
class Row:
    """One transition as veRL stores it."""

    key: str
    group: str
    fields: dict[str, Any]
    tag: dict[str, Any]


def rows_of(batch: Batch, chosen: NDArray[np.int64], step: int) -> list[Row]:
    """The rows of the transitions `chosen` for the update number `step`.

    The reward of a row is its credited value, at its last token, for veRL's own algorithms; agl's do not read it.
    """
    return [_row(batch, int(i), step) for i in chosen]


def place_of(key: str) -> int | None:
    """The transition that a row's key belongs to; None for a row that veRL padded in."""
    return None if key.startswith(PAD_PREFIX) else int(key.rsplit("_", 1)[1])


def spread(batch: Batch, values_R: Tensor, keys: Sequence[str]) -> list[Tensor]:
    """What belongs to each row's response tokens, row by row; of a pad row one zero: it weighs nothing."""
    offsets = batch.response_offsets
    found = []
    for key in keys:
        place = place_of(key)
        found.append(values_R.new_zeros(1) if place is None else values_R[offsets[place] : offsets[place + 1]])
    return found


def gather(batch: Batch, rows: Sequence[Tensor], keys: Sequence[str]) -> Tensor:
    """[R] what `spread` took apart: values that veRL computed by row, where the batch has their tokens; 0 elsewhere."""
    values_R = torch.zeros(int(batch.response_offsets[-1]), dtype=torch.float32)
    for key, row in zip(keys, rows, strict=True):
        place = place_of(key)
        if place is not None:
            start, end = batch.response_offsets[place : place + 2]
            values_R[start:end] = row[: end - start].to(torch.float32)
    return values_R


def lay_out(
    steps: Sequence[NDArray[np.int64]],
    workers: int,
    divide: Callable[[list[int], int], list[list[int]]],
) -> list[int]:
    """Row numbers in the order in which veRL deals them out: worker by worker, for each of them step by step.

    `steps` are the rows of each optimizer step, each row (0, 1, …) once; `divide(rows, workers)` splits rows into
    equally many for each worker, of about equal work. Every step is filled up with pads, whose numbers follow those of
    the rows, to the size of the largest, rounded up to a multiple of `workers`.
    """
    per_worker = max(-(-len(rows) // workers) for rows in steps)
    pads = iter(range(sum(map(len, steps)), per_worker * workers * len(steps)))
    dealt: list[list[list[int]]] = []
    for rows in steps:
        whole = [*rows.tolist(), *(next(pads) for _ in range(per_worker * workers - len(rows)))]
        dealt.append(divide(whole, workers))
    return [row for worker in range(workers) for step in dealt for row in step[worker]]


def _row(batch: Batch, i: int, step: int) -> Row:
    tokens = torch.from_numpy(batch.tokens_T[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))
    prompt = int(batch.prompt_lengths_N[i])
    responses = slice(int(batch.response_offsets[i]), int(batch.response_offsets[i + 1]))
    mask = torch.from_numpy(batch.mask_R[responses].astype(np.int64))
    behaviour = np.where(batch.mask_R[responses], batch.behaviour_logprobs_R[responses], 0.0).astype(np.float32)
    reward = torch.zeros(len(mask))
    reward[-1] = float(batch.values_N[i])
    group = f"u{step}g{int(batch.group_N[i])}"
    version = int(batch.version_N[i])
    return Row(
        key=f"{group}_{int(batch.rollout_N[i])}_{i}",
        group=group,
        fields={
            "uid": group,
            "session_id": int(batch.rollout_N[i]),
            "num_turns": int(batch.turn_N[i]) + 1,
            "prompts": tokens[:prompt],
            "responses": tokens[prompt:],
            "input_ids": tokens,
            "position_ids": torch.arange(len(tokens)),
            "response_mask": mask,
            "loss_mask": mask,
            "rm_scores": reward,
            "rollout_log_probs": torch.from_numpy(behaviour),
            "multi_modal_inputs": {},
        },
        tag={
            "status": "success",
            "prompt_len": prompt,
            "response_len": len(mask),
            "seq_len": len(tokens),
            "global_steps": step,
            "min_global_steps": version,
            "max_global_steps": version,
        },
    )


_RENAMED = {"lr": "learning_rate", TOTAL_LOSS: "loss"}


def named(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What the workers and veRL's trainer measured, numbers only.

    `actor/policy_loss` is `policy_loss`, as under the torch engine; the critic's are `value_…` or `critic_…`; what veRL
    measures beyond that keeps its name, for instance `rollout_probs_diff_max` (by how much training's probabilities
    differ from serving's).

    >>> named({"actor/lr": 0.1, "critic/grad_norm": 2.0, "critic/value_loss": 3.0, "training/x": 1.0})
    {'learning_rate': 0.1, 'critic_grad_norm': 2.0, 'value_loss': 3.0, 'x': 1.0}
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if not np.isscalar(value) or isinstance(value, str):
            continue
        role, _, rest = name.partition("/")
        if rest == "loss" and f"{role}/{TOTAL_LOSS}" in metrics:
            continue
        rest = _RENAMED.get(rest, rest)
        if role == "critic" and not rest.startswith("value_"):
            rest = f"critic_{rest}"
        found[rest if role in ("actor", "critic", "training") else name] = float(value)  # type: ignore[arg-type]
    return found
