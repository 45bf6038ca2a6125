"""A batch as veRL's rows, and agl's algorithms as the losses of its training workers.

A row is a chain of transitions that continue each other (`agl_algorithms.prepared.lineages`), ragged, as it was
sampled: the first prompt, and then responses with what came between them.

veRL calls the losses with a micro-batch; the responses in its rows are flattened to the ragged tensors of
`agl_algorithms`, so that these are the very functions that the torch engine runs. Token weights, and all that needs the
whole batch, come with the rows; a pad row's weights are zero. veRL averages gradients over its data-parallel workers,
so a sum over all rows is each worker's sum times their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_algorithms.policy_gradient import Logprobs, Samples
from agl_algorithms.ppo import Ppo
from agl_algorithms.prepared import Chain, places_of
from agl_core.errors import EngineError

if TYPE_CHECKING:  # veRL imports this in every process.
    from agl_algorithms.prepared import PreparedBatch
    from agl_core.learning.batch import TrainableBatch
    from agl_core.types import Batch
    from agl_verl.config import ChosenAlgorithm

SPAN = "span"
"""Beside the rows: the number of the transition at each of its response tokens, -1 between responses, N of pads."""
STEP_WEIGHT = "step_weight"
"""Beside the rows: the weight of all tokens of an optimizer step together, the mean over an update's steps."""
TRAINING_STEP = "training_step"
"""Beside the rows: the run's, from 1."""
OLD_LOGPROBS = "old_logprobs"
"""Metric of an update's only step: of each micro-batch the transitions of unmasked tokens, and log-probabilities."""
TOTAL_LOSS = "total_loss"
"""The metric of the whole loss; veRL has one of its own called `loss`, of raw sums."""


@dataclass
class Update:
    """One update while it is made."""

    usable: TrainableBatch
    samples: Samples
    prepared: PreparedBatch | None
    """None as long as the critic's values are not known."""
    sent: NDArray[np.int64]
    """The usable transitions that veRL computes."""
    steps: list[NDArray[np.int64]]
    """By optimizer step of one pass, its transitions."""
    chains: dict[str, Chain]
    """By its key, the transitions of each row; veRL's pad rows are not among them."""
    old_R: Tensor | None = None
    """Training's log-probabilities before the update; None until it is made."""
    rescored: Mapping[str, float] = field(default_factory=dict)
    """The algorithm's metrics of log-probabilities before the update, if it makes its advantages of them."""

    def of_rows(self, keys: Sequence[str]) -> list[Chain | None]:
        """The transitions of these rows; None for pad rows."""
        return [self.chains.get(key) for key in keys]


def temperature_of(batch: Batch, sent: Chain) -> float:
    """The temperature of these transitions; veRL has one a batch."""
    temperatures = np.unique(batch.temperature_N[sent])
    if len(temperatures) > 1:
        raise EngineError(
            f"The batch has transitions of several temperatures ({', '.join(map(str, temperatures))}); veRL trains "
            f"on one at a time. Give every training call the same: [sampling] temperature."
        )
    return float(temperatures[0])


def row_of(batch: Batch, chain: Chain) -> dict[str, Any]:
    """The fields of a chain's row, as veRL stores them."""
    first, last = int(chain[0]), int(chain[-1])
    tokens = torch.from_numpy(batch.tokens_T[batch.offsets[last] : batch.offsets[last + 1]].astype(np.int64))
    prompt = int(batch.prompt_lengths_N[first])
    places = places_of(batch, chain)
    trained = (places >= 0) & batch.mask_R[places]
    mask = torch.from_numpy(trained.astype(np.int64))
    behaviour = np.where(trained, batch.behaviour_logprobs_R[places], 0.0).astype(np.float32)
    return {
        "prompts": tokens[:prompt],
        "responses": tokens[prompt:],
        "input_ids": tokens,
        "position_ids": torch.arange(len(tokens)),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": torch.from_numpy(behaviour),
        "multi_modal_inputs": {},
    }


def spread(
    batch: Batch, values_R: Tensor, chains: Sequence[Chain | None], between: int = 0, pad: int = 0
) -> list[Tensor]:
    """Values of response tokens by row, with `between` between responses; of a pad row (None) `pad` once."""
    places = [None if chain is None else torch.from_numpy(places_of(batch, chain)) for chain in chains]
    return [
        values_R.new_full((1,), pad) if row is None else torch.where(row < 0, between, values_R[row]) for row in places
    ]


def gather(batch: Batch, rows: Sequence[Tensor], chains: Sequence[Chain | None]) -> Tensor:
    """[R] what `spread` took apart: values that veRL computed by row, where the batch has their tokens; 0 elsewhere."""
    values_R = torch.zeros(int(batch.response_offsets[-1]), dtype=torch.float32)
    for chain, row in zip(chains, rows, strict=True):
        if chain is not None:
            places = torch.from_numpy(places_of(batch, chain))
            values_R[places[places >= 0]] = row[: len(places)][places >= 0].to(torch.float32)
    return values_R


def join(samples: Samples, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """[R] the values of unmasked tokens, of which each part has transitions and values; 0 elsewhere."""
    transition_r, values_r = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    values_R = torch.zeros_like(samples.behaviour_R)
    known_R = samples.mask_R & torch.isin(samples.transition_R, transition_r)
    values_R[known_R] = values_r[torch.argsort(transition_r, stable=True)]
    return values_R


def fields_of(
    prepared: PreparedBatch, steps: Sequence[NDArray[np.int64]], chains: Sequence[Chain | None]
) -> dict[str, list[Tensor]]:
    """The fields that losses read beside the rows; `steps`: by optimizer step, its transitions."""
    fields = {
        "advantages": prepared.advantages_R,
        "loss_weights": prepared.step_weights(prepared.weights_R, steps),
    }
    if prepared.value is not None:
        fields["returns"] = prepared.value.targets_R
        fields["value_weights"] = prepared.step_weights(prepared.value.weights_R, steps)
    batch = prepared.batch
    return {
        SPAN: spread(batch, prepared.samples.transition_R, chains, between=-1, pad=len(batch)),
        **{name: spread(batch, values_R.to(torch.float32), chains) for name, values_R in fields.items()},
    }


def sees_its_own_past_alone(config: Any) -> bool:
    """True if a model's output at a token depends on the tokens before it, and not on how long its row is.

    `config` is the model's, of transformers. Two kinds of rotary embeddings change with the longest row of a pass.

    >>> from transformers import Qwen2Config
    >>> rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    >>> sees_its_own_past_alone(Qwen2Config()), sees_its_own_past_alone(Qwen2Config(rope_parameters=rope))
    (True, False)
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = {parameters.get("rope_type") for parameters in (rope, *rope.values()) if isinstance(parameters, Mapping)}
    return kinds.isdisjoint({"dynamic", "longrope"})


def lay_out(
    steps: Sequence[NDArray[np.int64]],
    workers: int,
    divide: Callable[[list[int], int], list[list[int]]],
) -> list[int]:
    """Row numbers in the order in which veRL deals them out: worker by worker, for each of them step by step.

    `steps` are the rows of each optimizer step; `divide(rows, workers)` splits rows into equally many for each worker,
    of about equal work. Every step is filled up with pads, whose numbers follow those of the rows.
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
    """The policy loss of one micro-batch, as veRL's `TrainingWorker` asks for it.

    Rows without old log-probabilities are of an update's only optimizer step: the current ones are the old ones.
    """
    samples, weights_R = _samples(data), _picked(data["loss_weights"], data)
    current_R = _of_responses(model_output["log_probs"], data)
    is_only_step = "old_log_probs" not in data
    old_R = current_R.detach() if is_only_step else _picked(data["old_log_probs"], data)
    algorithm = chosen.build()
    entropy_R = _of_responses(model_output["entropy"], data) if "entropy" in model_output else None
    loss, measured = algorithm.loss(
        samples,
        Logprobs(
            current_R=current_R,
            old_R=old_R,
            behaviour_R=torch.where(samples.behaviour_R.isnan(), old_R, samples.behaviour_R),
            reference_R=_picked(data["ref_log_prob"], data) if "ref_log_prob" in data else None,
            entropy_R=entropy_R if algorithm.needs_entropy else None,
        ),
        _picked(data["advantages"], data),
        weights_R,
    )
    sums = {TOTAL_LOSS: loss.detach(), **measured}
    if entropy_R is not None:
        sums["entropy"] = (weights_R * entropy_R.detach()).sum()
    metrics = _metrics(sums, data)
    if is_only_step:
        tokens = (_picked(data[SPAN], data), old_R.to(torch.float32))
        metrics[OLD_LOGPROBS] = tuple(values_R[samples.mask_R].cpu() for values_R in tokens)
    return loss * data["dp_size"], metrics


def critic_loss(
    chosen: ChosenAlgorithm, model_output: Mapping[str, Tensor], data: Any, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """The value loss of one micro-batch, as veRL's `TrainingWorker` asks for it."""
    loss, measured = cast(Ppo, chosen.build()).value_loss(
        _of_responses(model_output["values"], data),
        _picked(data["values"], data),
        _picked(data["returns"], data),
        _picked(data["value_weights"], data),
    )
    return loss * data["dp_size"], _metrics(measured, data)


def _of_responses(output: Tensor, data: Any) -> Tensor:
    """[R] what a model says of the response tokens, out of its output for whole sequences (nested)."""
    from verl.workers.utils.padding import response_from_nested

    return _picked(response_from_nested(output, data["response_mask"]), data)


def _picked(field: Tensor, data: Any) -> Tensor:
    """[R] a field of the rows (nested), without what is between responses."""
    values: Tensor = field.values()
    return values[data[SPAN].values() >= 0]


def _samples(data: Any) -> Samples:
    """The transitions in the rows as a loss may know them, without what only advantages need."""
    _, transition_R = torch.unique_consecutive(_picked(data[SPAN], data), return_inverse=True)
    number_N = torch.arange(int(transition_R[-1]) + 1, device=transition_R.device)
    return Samples(
        transition_R=transition_R,
        mask_R=_picked(data["response_mask"], data) > 0,
        behaviour_R=_picked(data["rollout_log_probs"], data),
        values_N=torch.zeros_like(number_N, dtype=torch.float64),
        group_N=number_N,
        rollout_N=number_N,
        turn_N=torch.zeros_like(number_N),
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


_RENAMED = {"lr": "learning_rate", TOTAL_LOSS: "loss"}


def named(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The measurements of workers and of veRL's trainer by agl's names, numbers only.

    `actor/policy_loss` is `policy_loss`, as under the torch engine; the critic's are `value_…` or `critic_…`; what veRL
    measures beyond that keeps its name, unless it is not known.

    >>> named({"actor/lr": 0.1, "critic/grad_norm": 2.0, "critic/value_loss": 3.0, "training/x": 1.0})
    {'learning_rate': 0.1, 'critic_grad_norm': 2.0, 'value_loss': 3.0, 'x': 1.0}
    """
    renamed: dict[str, float] = {}
    for name, value in metrics.items():
        if not np.isscalar(value) or isinstance(value, str):
            continue
        role, _, rest = name.partition("/")
        if role == "training" and np.isnan(value):
            continue
        if rest == "loss" and f"{role}/{TOTAL_LOSS}" in metrics:
            continue
        rest = _RENAMED.get(rest, rest)
        if role == "critic" and not rest.startswith("value_"):
            rest = f"critic_{rest}"
        renamed[rest if role in ("actor", "critic", "training") else name] = float(value)  # type: ignore[arg-type]
    return renamed
