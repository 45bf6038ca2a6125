"""A batch as veRL's rows, and agl's algorithms as the losses of its training workers.

A row is one transition, ragged: prompt and response as they were sampled. Its key is `GROUP_ROLLOUT_PLACE`, the form
`{uid}_{session}_{index}` that veRL groups by.

veRL calls the losses that `worker_group.set_loss_fn(partial(actor_loss, chosen))` gave it with a micro-batch; its rows
are flattened to the ragged tensors of `agl_algorithms`, so that these are the very functions that the torch
engine runs. Token weights come with the rows, already normalised over the whole optimizer step and corrected, and so
does everything that needs the whole batch; a pad row's weights are zero. veRL averages gradients over its data-parallel
workers, so a sum over all rows is each worker's sum times their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_algorithms.policy_gradient import Logprobs, PolicyGradient, Samples
from agl_algorithms.ppo import Ppo

if TYPE_CHECKING:  # veRL imports this in every process.
    from agl_algorithms.prepared import Prepared
    from agl_core.types import Batch
    from agl_verl.config import ChosenAlgorithm

PAD_PREFIX = "pad"
"""veRL's own pad rows have keys that begin like this."""
STEP_WEIGHT = "step_weight"
"""Beside the rows: the weight of all tokens of an optimizer step together, the mean over an update's steps."""
TRAINING_STEP = "training_step"
"""Beside the rows: the run's, from 1."""
TOTAL_LOSS = "total_loss"
"""The metric of the whole loss; veRL has one of its own called `loss`, of raw sums."""


@dataclass(frozen=True, slots=True)
class Row:
    """One transition as veRL stores it."""

    key: str
    fields: dict[str, Any]
    tag: dict[str, Any]


def row_of(batch: Batch, i: int, step: int) -> Row:
    """The row of transition `i` for the update number `step`.

    Its reward is its credited value, at its last token, for veRL's own algorithms; agl's do not read it.
    """
    tokens = torch.from_numpy(batch.tokens_T[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))
    prompt = int(batch.prompt_lengths_N[i])
    responses = slice(int(batch.response_offsets[i]), int(batch.response_offsets[i + 1]))
    mask = torch.from_numpy(batch.mask_R[responses].astype(np.int64))
    behaviour = np.where(batch.mask_R[responses], batch.behaviour_logprobs_R[responses], 0.0).astype(np.float32)
    reward = torch.zeros(len(mask))
    reward[-1] = float(batch.values_N[i])
    group = f"u{step}g{int(batch.group_N[i])}"
    return Row(
        key=f"{group}_{int(batch.rollout_N[i])}_{i}",
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
        tag={"seq_len": len(tokens)},
    )


def place_of(key: str) -> int | None:
    """The transition that a row's key belongs to; None for a row that veRL padded in."""
    return None if key.startswith(PAD_PREFIX) else int(key.rsplit("_", 1)[1])


def spread(batch: Batch, values_R: Tensor, keys: Sequence[str]) -> list[Tensor]:
    """Values of response tokens, row by row; of a pad row one zero: it weighs nothing."""
    offsets = batch.response_offsets
    places = map(place_of, keys)
    return [values_R.new_zeros(1) if i is None else values_R[offsets[i] : offsets[i + 1]] for i in places]


def gather(batch: Batch, rows: Sequence[Tensor], keys: Sequence[str]) -> Tensor:
    """[R] what `spread` took apart: values that veRL computed by row, where the batch has their tokens; 0 elsewhere."""
    values_R = torch.zeros(int(batch.response_offsets[-1]), dtype=torch.float32)
    for key, row in zip(keys, rows, strict=True):
        place = place_of(key)
        if place is not None:
            start, end = batch.response_offsets[place : place + 2]
            values_R[start:end] = row[: end - start].to(torch.float32)
    return values_R


def nested(rows: Sequence[Tensor]) -> Tensor:
    """One jagged tensor of rows."""
    return torch.nested.as_nested_tensor([row.to(torch.float32) for row in rows], layout=torch.jagged)


def fields_of(prepared: Prepared, steps: Sequence[NDArray[np.int64]]) -> dict[str, Tensor]:
    """The fields that losses read beside the rows, each [R]; `steps`: by optimizer step, its transitions."""
    fields = {
        "advantages": prepared.advantages_R,
        "loss_weights": prepared.step_weights(prepared.weights_R, steps),
    }
    if prepared.value is not None:
        fields["returns"] = prepared.value.targets_R
        fields["value_weights"] = prepared.step_weights(prepared.value.weights_R, steps)
    return fields


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


def actor_loss(
    chosen: ChosenAlgorithm, model_output: Mapping[str, Tensor], data: Any, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """The policy loss of one micro-batch, as veRL's `TrainingWorker` asks for it."""
    behaviour_R = data["rollout_log_probs"].values()
    reference = data.get("ref_log_prob", None)
    loss, measured = cast(PolicyGradient, chosen.build()).loss(
        _samples(data["response_mask"], behaviour_R),
        Logprobs(
            current_R=_of_responses(model_output["log_probs"], data),
            old_R=data["old_log_probs"].values(),
            behaviour_R=behaviour_R,
            reference_R=None if reference is None else reference.values(),
        ),
        data["advantages"].values(),
        data["loss_weights"].values(),
    )
    return loss * data["dp_size"], _metrics({TOTAL_LOSS: loss.detach(), **measured}, data)


def critic_loss(
    chosen: ChosenAlgorithm, model_output: Mapping[str, Tensor], data: Any, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """The value loss of one micro-batch, as veRL's `TrainingWorker` asks for it."""
    loss, measured = cast(Ppo, chosen.build()).value_loss(
        _of_responses(model_output["values"], data),
        data["values"].values(),
        data["returns"].values(),
        data["value_weights"].values(),
    )
    return loss * data["dp_size"], _metrics(measured, data)


def _of_responses(output: Tensor, data: Any) -> Tensor:
    """[R] what a model says of the response tokens, out of its output for whole sequences (nested)."""
    from verl.workers.utils.padding import response_from_nested

    response: Tensor = response_from_nested(output, data["response_mask"]).values()
    return response


def _samples(response_mask: Any, behaviour_R: Tensor) -> Samples:
    """The rows as a loss may know them, without what only advantages need.

    `response_mask`: nested, [B, lengths]; it also says how long each response is.
    """
    lengths_B = response_mask.offsets().diff()
    row_B = torch.arange(len(lengths_B), device=lengths_B.device)
    return Samples(
        transition_R=row_B.repeat_interleave(lengths_B),
        mask_R=response_mask.values() > 0,
        behaviour_R=behaviour_R,
        values_N=torch.zeros_like(row_B, dtype=torch.float64),
        group_N=row_B,
        rollout_N=row_B,
        turn_N=torch.zeros_like(row_B),
    )


def _metrics(measured: Mapping[str, Tensor], data: Any) -> dict[str, Any]:
    """Means over tokens by weight: veRL adds up over micro-batches, and averages over its workers and over steps."""
    from verl.utils.metric import AggregationType, Metric

    share = data["dp_size"] / data[STEP_WEIGHT]
    return {
        name: Metric(value=value, aggregation=AggregationType.MAX)
        if name.endswith("_max")
        else Metric(value=value * share, aggregation=AggregationType.SUM)
        for name, value in measured.items()
    }


def catch_up(scheduler: Any, training_step: int) -> None:
    """Bring a scheduler that made a step after every update to where it is when all steps before made one.

    A constant step size is left alone: its scheduler knows the warm-up only, which is the optimizer's own.
    """
    while scheduler.last_epoch < training_step - 1:
        scheduler.step()


_RENAMED = {"lr": "learning_rate", TOTAL_LOSS: "loss"}


def named(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The measurements of workers and of veRL's trainer by agl's names, numbers only.

    `actor/policy_loss` is `policy_loss`, as under the torch engine; the critic's are `value_…` or `critic_…`; what veRL
    measures beyond that keeps its name, for instance `rollout_probs_diff_max` (by how much training's probabilities
    differ from serving's).

    >>> named({"actor/lr": 0.1, "critic/grad_norm": 2.0, "critic/value_loss": 3.0, "training/x": 1.0})
    {'learning_rate': 0.1, 'critic_grad_norm': 2.0, 'value_loss': 3.0, 'x': 1.0}
    """
    renamed: dict[str, float] = {}
    for name, value in metrics.items():
        if not np.isscalar(value) or isinstance(value, str):
            continue
        role, _, rest = name.partition("/")
        if rest == "loss" and f"{role}/{TOTAL_LOSS}" in metrics:
            continue
        rest = _RENAMED.get(rest, rest)
        if role == "critic" and not rest.startswith("value_"):
            rest = f"critic_{rest}"
        renamed[rest if role in ("actor", "critic", "training") else name] = float(value)  # type: ignore[arg-type]
    return renamed
