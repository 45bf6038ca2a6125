"""Effects of the algorithms' settings, found for whatever algorithms are installed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, get_args, get_origin

import numpy as np
import torch
from pydantic import BaseModel, ValidationError

from agl_algorithms.interface import Algorithm, CriticAlgorithm, Logprobs, Samples
from agl_core import kinds
from agl_core.plugins import Component, Plugins

from .policy_effects import trained
from .settings_bench import Bench, Effect, Given
from .tiny_policy import make_batch

TRIED = (True, False, 2, 3, 0.5, 0.05)
"""Values for any setting, besides the words that its type names; what it does not take is passed over."""
READ_BY_ENGINES = {*Algorithm.__annotations__, *CriticAlgorithm.__annotations__}
"""Attributes of an algorithm: what they do is seen in training only."""


def effects(plugins: Plugins) -> dict[str, Effect]:
    """One for each setting of each algorithm; a setting that can be changed in no way is missing."""
    algorithms = plugins.components(kinds.ALGORITHM)
    another = max(algorithms.keys() - {"grpo"})
    found = {"algorithm.name": Effect(trained, {"algorithm.name": another})}
    for name, component in algorithms.items():
        for field in component.options.model_fields:
            for given, change in itertools.islice(_changes(component.options, field), 1):
                found[f"algorithm.{name}.{field}"] = Effect(
                    trained if field in READ_BY_ENGINES else partial(what_it_computes, component),
                    {"algorithm": {"name": name, name: change}},
                    {"algorithm": {"name": name, name: given}},
                )
    return found


def _changes(options: type[BaseModel], field: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Settings before and after a change of one, with as few others set as possible.

    A setting that another one switches off has to be refused, so that the fewest that are accepted let it work.
    """
    others = [(name, value) for name in options.model_fields if name != field for value in _values(options, name)]
    for count in range(3):
        for chosen in itertools.combinations(others, count):
            given = dict(chosen)
            for value in _values(options, field):
                if len(given) == count and _accepted(options, given) and _accepted(options, {**given, field: value}):
                    yield given, {**given, field: value}


def _values(options: type[BaseModel], field: str) -> Iterator[Any]:
    declared = options.model_fields[field]
    parts = [declared.annotation, *get_args(declared.annotation)]
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    for value in (*words, *TRIED):
        if value != declared.default or isinstance(value, bool) != isinstance(declared.default, bool):
            yield value


def _accepted(options: type[BaseModel], settings: Mapping[str, Any]) -> bool:
    try:
        options.model_validate(settings, strict=True)
    except ValidationError:
        return False
    return True


def what_it_computes(component: Component, bench: Bench, given: Given) -> list[Any]:
    """Every function of the algorithm on one batch: advantages, weights, loss, gradient, and those for a critic."""
    algorithm = component.build(bench.load(given).policies["default"].algorithm.options)
    samples, logprobs, values_R, later_R = _material()
    advantages_R = algorithm.advantages(samples, values_R if algorithm.needs_critic else None)
    weights_R = algorithm.weights(samples)
    loss, metrics = algorithm.loss(samples, logprobs, advantages_R, weights_R)
    (gradient_R,) = torch.autograd.grad(loss, logprobs.current_R)
    found = [advantages_R, algorithm.keep(samples, advantages_R), weights_R, loss.detach(), gradient_R]
    if algorithm.needs_critic:
        targets_R, value_weights_R = algorithm.value_targets(samples, values_R), algorithm.value_weights(samples)
        value_loss, value_metrics = algorithm.value_loss(later_R, values_R, targets_R, value_weights_R)
        found += [targets_R, value_weights_R, value_loss]
        metrics = {**metrics, **value_metrics}
    return [*(tensor.tolist() for tensor in found), {name: value.item() for name, value in metrics.items()}]


def _material() -> tuple[Samples, Logprobs, torch.Tensor, torch.Tensor]:
    """Samples, log-probabilities that moved, and a critic's values before and after."""
    batch = make_batch(3)
    generator = torch.Generator().manual_seed(4)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(len(batch.mask_R), generator=generator, dtype=torch.float64)

    old_R = torch.from_numpy(batch.behaviour_logprobs_R).double() + noise(0.3)
    samples = Samples(
        transition_R=torch.from_numpy(np.repeat(np.arange(len(batch)), batch.response_lengths_N)),
        mask_R=torch.from_numpy(batch.mask_R),
        behaviour_R=torch.from_numpy(batch.behaviour_logprobs_R).double(),
        values_N=torch.from_numpy(batch.values_N),
        scores_N=torch.from_numpy(batch.scores_N),
        group_N=torch.from_numpy(batch.group_N),
        rollout_N=torch.from_numpy(batch.rollout_N),
        turn_N=torch.from_numpy(batch.turn_N),
    )
    current_R = (old_R + noise(0.3)).requires_grad_()
    return samples, Logprobs(current_R, old_R, samples.behaviour_R, old_R + noise(0.3)), noise(0.5), noise(0.5)
