"""One update of one policy: the algorithm's loss is computed here, its gradient is applied by the service.

An optimizer step takes two passes. `forward` gives each token's log-probability; the loss and its gradient with respect
to these are computed here, by the very functions of the other engines; and a row's loss `importance_sampling`, at the
log-probabilities that were just computed, has this gradient as its advantages: of -ratio · A at ratio 1 it is -A.

One pass is enough where the gradient is the same at all log-probabilities, as with SFT and a single step of GRPO: it is
known before, and `cross_entropy` has it as its weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tinker
import torch
from numpy.typing import NDArray
from tinker.types import ForwardBackwardOutput
from torch import Tensor

from agl_algorithms.policy_gradient import Algorithm, Logprobs
from agl_algorithms.prepared import Chain, PreparedBatch, lineages, minibatches, places_of, prepare, samples_of
from agl_core.config.sections import rate_share, usual_learning_rate
from agl_core.errors import EngineError
from agl_core.learning.batch import filter_trainable
from agl_core.protocols import PolicySpec, Progress, ResponseScores, UpdateResult
from agl_core.types import Batch
from agl_tinker.service import Division, Service, datum, unique


class Row:
    """The tokens of a chain of transitions, and where its response tokens stand in the batch's arrays over [R]."""

    def __init__(self, batch: Batch, chain: Chain) -> None:
        last = int(chain[-1])
        self.tokens = batch.tokens_T[batch.offsets[last] : batch.offsets[last + 1]].tolist()
        places = places_of(batch, chain)
        targets = np.full(len(self.tokens) - 1, -1, np.int64)
        targets[len(targets) - len(places) :] = places
        self.places = torch.from_numpy(targets)
        """[tokens - 1] the index in [R] of what each position predicts; -1 for what is no response."""

    def datum(self, **inputs_R: Tensor) -> tinker.Datum:
        """The row with a loss's inputs, which are 0 at what is no response."""
        return datum(self.tokens, **{name: self._spread(values_R) for name, values_R in inputs_R.items()})

    def gather(self, values: Sequence[float | None], into_R: Tensor) -> None:
        """Put what the service computed for each target to its place."""
        known = self.places >= 0
        computed = torch.tensor([value or 0.0 for value in values], dtype=into_R.dtype)
        into_R[self.places[known]] = computed[: len(known)][known]

    def _spread(self, values_R: Tensor) -> list[float]:
        values: list[float] = torch.where(self.places < 0, 0.0, values_R[self.places].to(torch.float32)).tolist()
        return values


class PolicyTrainer:
    """Updates one policy. `reference` samples from its base, with the log-probabilities of the initial weights, and
    `teacher` from the model that an algorithm may learn from."""

    def __init__(
        self,
        service: Service,
        client: tinker.TrainingClient,
        spec: PolicySpec,
        division: Division,
        *,
        reference: tinker.SamplingClient,
        teacher: tinker.SamplingClient | None = None,
        context_length: int,
        vocabulary: int,
        seed: int,
        steps: int,
    ) -> None:
        settings = spec.optimizer
        if settings.learning_rate is None:
            rate = usual_learning_rate(None, adapter=True)
            settings = settings.model_copy(update={"learning_rate": rate})
        self.version = self.optimizer_steps = 0
        self.client = client
        self._service, self.spec, self._settings, self._division = service, spec, settings, division
        self._reference, self._teacher, self._seed, self._training_steps = reference, teacher, seed, steps
        self._limits = {"context_length": context_length, "vocabulary": vocabulary}
        self.counters = Counter(tokens_prefilled=0, tokens_trained=0, tokens_scored=0)

    def update(self, batch: Batch, algorithm: Algorithm, progress: Progress) -> UpdateResult:
        """Train on a batch; the version grows by one, also if nothing in the batch could be trained on."""
        usable = filter_trainable(batch, grammars=False, **self._limits)
        samples = samples_of(usable.batch)
        prepared = prepare(usable, samples, algorithm)
        _check_temperature(prepared)
        rows, unknown_R = self._rows(prepared.batch, prepared.trained), torch.full_like(samples.behaviour_R, torch.nan)
        reference_R = self._frozen_logprobs(self._reference, rows, unknown_R) if algorithm.needs_reference else None
        once = algorithm.epochs == algorithm.minibatches == 1 and not algorithm.needs_scores
        old_R = unknown_R if once else self._forward(rows, unknown_R)
        rescored: dict[str, float] = {}
        if algorithm.needs_scores and len(prepared.trained):
            teacher_R = None if self._teacher is None else self._frozen_logprobs(self._teacher, rows, unknown_R)
            logprobs = Logprobs(old_R, old_R, old_R, reference_R, teacher_R=teacher_R)
            prepared, rescored = prepared.rescored(algorithm, logprobs)
        steps = minibatches(prepared.batch, prepared.trained, algorithm.minibatches, [self._seed, self.version])
        steps *= algorithm.epochs
        sums: dict[str, float] = {}
        weight, applied, skipped, stopped, rate, kl = 0.0, 0, 0, 0, 0.0, 0.0
        for number, chosen in enumerate(steps):
            weights_R = prepared.step_weights(prepared.weights_R, [chosen])
            of_step = self._rows(prepared.batch, chosen)
            tokens_R = torch.isin(samples.transition_R, torch.from_numpy(chosen))
            gradient = partial(_gradient, algorithm, prepared, reference_R, tokens_R, weights_R)
            constant_R = _constant(gradient, samples.behaviour_R) if once and self._division.weighs else None
            if constant_R is not None:
                current_R = self._backward(of_step, constant_R)
            else:  # Before the first step nothing has changed since.
                current_R = self._forward(of_step, unknown_R) if applied or once else old_R
            if once:
                old_R = current_R
            gradient_R, measured = gradient(current_R, old_R)
            kl = measured.get("kl_old", 0.0) / (float(weights_R[tokens_R].sum()) or 1.0)
            if algorithm.target_kl is not None and kl > algorithm.target_kl:
                stopped = len(steps) - number
                break
            progress((number + 0.5) / len(steps))
            if constant_R is not None and (gradient_R is None or not torch.equal(gradient_R, constant_R)):
                # A new adapter with the same weights and optimizer has no wrong gradient.
                self.restore(self.state(unique("renewed", self.version)))
                constant_R = None
            if gradient_R is None:
                skipped += 1
                continue
            if constant_R is None:
                self._backward(of_step, gradient_R, current_R)
            rate = self._step(batch.step)
            applied += 1
            weight += float(weights_R[tokens_R].sum())
            for name, value in measured.items():
                sums[name] = max(sums.get(name, value), value) if name.endswith("_max") else sums.get(name, 0) + value
            progress((number + 1) / len(steps))
        metrics = {name: total if name.endswith("_max") else total / weight for name, total in sums.items()}
        metrics |= {"learning_rate": rate, "steps_applied": float(applied), "steps_skipped": float(skipped), **rescored}
        if algorithm.target_kl is not None:
            metrics |= {"kl_old": kl, "stopped_early": float(stopped)}
        metrics |= prepared.serving_gap(old_R, self.version)
        if skipped and not applied:
            prepared = prepared.without(prepared.trained)
        progress(1.0)
        self.version += 1
        return prepared.result(self.version, metrics | prepared.metrics(), old_R)

    def logprobs(self, batch: Batch) -> ResponseScores:
        """Scores of a batch's response tokens under the current weights; which tokens are likeliest is not known."""
        rows = self._rows(batch, np.arange(len(batch)))
        size = int(batch.response_offsets[-1])
        return ResponseScores(self._forward(rows, torch.zeros(size, dtype=torch.float64)).numpy(), None)

    def _rows(self, batch: Batch, chosen: NDArray[np.int64]) -> list[Row]:
        return [Row(batch, chain) for chain in lineages(batch, chosen)]

    def _forward(self, rows: Sequence[Row], like_R: Tensor) -> Tensor:
        """[R] log-probabilities under the current weights, where these rows have tokens; 0 elsewhere."""
        if not rows:
            return torch.zeros_like(like_R)
        self.counters["tokens_scored"] += sum(len(row.tokens) for row in rows)
        data = [row.datum(weights=torch.ones_like(like_R)) for row in rows]
        return self._computed(rows, self.client.forward(data, "cross_entropy"), like_R)

    def _backward(self, rows: Sequence[Row], gradient_R: Tensor, at_R: Tensor | None = None) -> Tensor:
        """Send the gradient of these log-probabilities, or None: of any; returns them as `_forward` does."""
        self.counters["tokens_trained"] += sum(len(row.tokens) for row in rows)
        data = []
        for row in rows:
            descent_R = gradient_R * -self._division.undone(len(row.tokens) - 1, len(rows))
            inputs_R = {"weights": descent_R} if at_R is None else {"logprobs": at_R, "advantages": descent_R}
            data.append(row.datum(**inputs_R))
        sent = self.client.forward_backward(data, "cross_entropy" if at_R is None else "importance_sampling")
        return self._computed(rows, sent, gradient_R)

    def _computed(self, rows: Sequence[Row], sent: tinker.APIFuture[ForwardBackwardOutput], like_R: Tensor) -> Tensor:
        logprobs_R = torch.zeros_like(like_R)
        with self._service.explained("computing log-probabilities"):
            output = sent.result(self._service.options.timeout)
        for row, of_row in zip(rows, output.loss_fn_outputs, strict=True):
            row.gather(of_row["logprobs"].data, logprobs_R)
        return logprobs_R

    def _frozen_logprobs(self, model: tinker.SamplingClient, rows: Sequence[Row], like_R: Tensor) -> Tensor:
        """As `_forward`, under a model that is not trained."""
        logprobs_R = torch.zeros_like(like_R)
        with self._service.explained("asked for the log-probabilities of another model"):
            asked = [model.compute_logprobs(tinker.ModelInput.from_ints(row.tokens)) for row in rows]
            for row, future in zip(rows, asked, strict=True):
                # The first token has none; not every service says so.
                row.gather(future.result(self._service.options.timeout)[1 - len(row.tokens) :], logprobs_R)
        self.counters["tokens_prefilled"] += sum(len(row.tokens) for row in rows)
        return logprobs_R

    def _step(self, training_step: int) -> float:
        """One optimizer step; returns its size."""
        settings = self._settings
        assert settings.learning_rate is not None
        steps = (self.optimizer_steps, training_step, self._training_steps)
        rate = settings.learning_rate * rate_share(settings.schedule, settings.warmup_steps, *steps)
        limits = {"weight_decay": settings.weight_decay, "grad_clip_norm": settings.max_grad_norm}
        adam = tinker.AdamParams(learning_rate=rate, beta1=0.9, beta2=0.999, eps=1e-8, **limits)
        with self._service.explained("making an optimizer step"):
            self.client.optim_step(adam).result(self._service.options.timeout)
        self.optimizer_steps += 1
        return rate

    def state(self, name: str) -> dict[str, Any]:
        """All that later updates depend on; the service keeps weights and optimizer."""
        with self._service.explained("saving a checkpoint"):
            path = self.client.save_state(name).result(self._service.options.timeout).path
        return {"path": path, "version": self.version, "optimizer_steps": self.optimizer_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, with a new adapter: Tinker loads into none that has worked."""
        client = self._service.trains(self.spec, self._seed)
        with self._service.explained(f"loading {state['path']}"):
            client.load_state_with_optimizer(state["path"]).result(self._service.options.timeout)
        self.client = client
        self.version, self.optimizer_steps = state["version"], state["optimizer_steps"]


def _gradient(
    algorithm: Algorithm,
    prepared: PreparedBatch,
    reference_R: Tensor | None,
    tokens_R: Tensor,
    weights_R: Tensor,
    current_R: Tensor,
    old_R: Tensor,
) -> tuple[Tensor | None, dict[str, float]]:
    """[R] the gradient of the step's loss with respect to each log-probability, 0 elsewhere; None if not finite."""
    leaf_r = current_R[tokens_R].detach().requires_grad_()
    loss, measured = prepared.loss(algorithm, tokens_R, weights_R[tokens_R], leaf_r, old_R, reference_R)
    [gradient_r] = torch.autograd.grad(loss, [leaf_r])
    metrics = {"loss": float(loss.detach())} | {name: float(value.detach()) for name, value in measured.items()}
    if not (torch.isfinite(loss) and torch.isfinite(gradient_r).all()):
        return None, metrics
    gradient_R = torch.zeros_like(current_R)
    gradient_R[tokens_R] = gradient_r.to(current_R.dtype)
    return gradient_R, metrics


def _constant(gradient: Callable[[Tensor, Tensor], tuple[Tensor | None, Any]], at_R: Tensor) -> Tensor | None:
    """[R] the gradient of a single step, if it is the same at two points; None if it depends on log-probabilities."""
    at_R = at_R.nan_to_num(nan=-1.0)
    here_R, below_R = gradient(at_R, at_R)[0], gradient(at_R - 1, at_R - 1)[0]
    return here_R if here_R is not None and below_R is not None and torch.equal(here_R, below_R) else None


def _check_temperature(prepared: PreparedBatch) -> None:
    others = np.unique(prepared.batch.temperature_N[prepared.trained])
    if any(others != 1.0):
        raise EngineError(
            f"A Tinker service trains at the temperature 1, and these calls were sampled at "
            f"{', '.join(f'{value:g}' for value in others)}: set [sampling] temperature = 1."
        )
