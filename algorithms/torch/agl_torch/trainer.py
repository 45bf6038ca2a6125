"""One update of one policy: validate, value, compare, weigh, step; with the policy's critic, if it has one."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agl_algorithms.policy_gradient import Algorithm, Logprobs
from agl_algorithms.ppo import Ppo, explained_variance
from agl_algorithms.prepared import PreparedBatch, minibatches, prepare, samples_of
from agl_core.config.sections import OptimizerSection, usual_learning_rate
from agl_core.learning.batch import filter_trainable
from agl_core.protocols import Progress, ResponseScores, UpdateResult
from agl_core.types import Batch
from agl_torch.batching import Limits, MicroBatch, TokenScores, micro_batches, read_values, recompute_layers, score
from agl_torch.loading import LoadedModel
from agl_torch.optimizer import PolicyOptimizer
from agl_torch.teachers import ServedTeacher

BACKWARD_COST = 2.0
"""A backward pass takes about as long as two forward passes."""


def passes_of(algorithm: Algorithm) -> float:
    """The cost of an update per token, in forward passes over it."""
    steps = algorithm.epochs * algorithm.minibatches
    passes = (1 + BACKWARD_COST) * algorithm.epochs + algorithm.needs_reference + (steps > 1 or algorithm.needs_scores)
    passes += algorithm.needs_scores and algorithm.teacher is not None
    if algorithm.needs_critic:
        passes += 1 + (1 + BACKWARD_COST) * cast(Ppo, algorithm).critic_epochs
    return passes


class Work:
    """How far an update is, and how long its phases took; `total` is all of it, in forward passes over one token."""

    def __init__(self, progress: Progress | None = None, total: float = 0.0) -> None:
        self._progress = progress or (lambda share: None)
        self._total, self._done = total, 0.0
        self._started = self._lap_started = time.perf_counter()
        self._seconds = defaultdict[str, float](float)

    def advance(self, tokens: int, cost: float) -> None:
        """`tokens` went through a pass that costs `cost` times a forward pass."""
        self._done += tokens * cost
        self._progress(min(1.0, self._done / (self._total or math.inf)))

    def lap(self, phase: str) -> None:
        """A phase, or another part of it, ended."""
        now = time.perf_counter()
        self._seconds[f"seconds_{phase}"] += now - self._lap_started
        self._lap_started = now

    def finish(self) -> dict[str, float]:
        """The seconds of each phase and of the whole."""
        self._progress(1.0)
        return self._seconds | {"seconds_update": time.perf_counter() - self._started}


class PolicyTrainer:
    """Updates one policy by optimizer steps that never depend on how a batch is split.

    `initial` loads the initial weights once more, when an algorithm first needs a critic or a frozen reference (below
    an adapter there is one already). A schedule of the step size ends after `steps`, the run's training steps.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: OptimizerSection,
        *,
        steps: int = 0,
        tokens_per_micro_batch: int,
        gradient_checkpointing: bool = False,
        seed: int = 0,
        initial: Callable[[], LoadedModel] | None = None,
    ) -> None:
        self.version = self.tokens_trained = 0
        self.tokens_per_pass = tokens_per_micro_batch
        trained = [weight for weight in loaded.model.parameters() if weight.requires_grad]
        if settings.learning_rate is None:
            rate = usual_learning_rate(loaded.size, adapter=loaded.has_adapter)
            settings = settings.model_copy(update={"learning_rate": rate})
        self.optimizer = PolicyOptimizer(trained, settings, training_steps=steps)
        self._loaded = loaded
        self._limits = Limits.of(loaded.model, tokens_per_micro_batch)
        self._precision = torch.promote_types(loaded.dtype, torch.float32)
        self.seed = seed
        self.gradient_checkpointing = gradient_checkpointing
        self._initial = initial
        self._reference: Any = None
        self._critic: Critic | None = None
        if gradient_checkpointing:
            recompute_layers(loaded.model)

    def update(
        self,
        batch: Batch,
        algorithm: Algorithm,
        progress: Progress | None = None,
        teacher: LoadedModel | ServedTeacher | None = None,
    ) -> UpdateResult:
        """Train on a batch; the version grows by one, also when nothing in the batch could be trained on.

        The same batch, weights and optimizer state give the same result. An optimizer step whose loss or gradient is
        not finite is skipped and counted. docs/health.md has the metrics.
        """
        model, device = self._loaded.model, self._loaded.device
        models = [model for model in (self._loaded, teacher) if isinstance(model, LoadedModel)]
        vocabulary = min(model.vocabulary for model in models)
        usable = filter_trainable(
            batch,
            context_length=min(model.context_length for model in models),
            vocabulary=vocabulary,
            # A teacher normalises over the allowed tokens where it is known which of its own they are.
            grammars=teacher is None or (teacher in models and vocabulary == models[-1].vocabulary),
        )
        work = Work(progress, float(len(usable.batch.tokens_T) * passes_of(algorithm)))
        samples = samples_of(usable.batch, dtype=self._precision, device=device)
        work.lap("prepare")
        values_R = None
        if algorithm.needs_critic:
            self._critic = self._critic or Critic(self._load_initial(), self)
            values_R = self._critic.values(usable.batch, work)
        work.lap("values")
        prepared = prepare(usable, samples, algorithm, values_R)
        work.lap("prepare")
        reference_R = self._reference_logprobs(prepared, work) if algorithm.needs_reference else None
        teacher_R = None if teacher is None else self._teacher_logprobs(teacher, prepared, work)
        work.lap("reference")
        once = algorithm.epochs == 1 and algorithm.minibatches == 1 and not algorithm.needs_scores
        # In a single step each token's current log-probability is its old one, known when the loss needs it.
        old_R = torch.full_like(samples.behaviour_R, torch.nan) if once else self._logprobs(model, prepared, work)
        rescored: dict[str, float] = {}
        if algorithm.needs_scores and len(prepared.trained):
            prepared, rescored = prepared.rescored(
                algorithm, Logprobs(old_R, old_R, old_R, reference_R, teacher_R=teacher_R)
            )
        work.lap("old")
        self.optimizer.training_step = batch.step

        def loss_of(micro: MicroBatch, token_weights_R: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
            self.tokens_trained += micro.tokens
            allowed, tokens_R = self.allowed(prepared.batch, micro), micro.tokens_R
            scores = score(model, micro, allowed, entropy_gradient=algorithm.needs_entropy)
            if once:
                old_R[tokens_R] = scores.logprobs_R.detach()
            entropy_r = scores.entropy_R if algorithm.needs_entropy else None
            loss, measured = prepared.loss(
                algorithm, tokens_R, token_weights_R, scores.logprobs_R, old_R, reference_R, entropy_r
            )
            return loss, {"loss": loss, "entropy": (token_weights_R * scores.entropy_R).sum(), **measured}

        steps = minibatches(prepared.batch, prepared.trained, algorithm.minibatches, [self.seed, self.version])
        steps *= algorithm.epochs
        target, weights_R = algorithm.target_kl, prepared.weights_R
        metrics = train(self.optimizer, prepared, weights_R, steps, self._limits, loss_of, work, target)
        work.lap("train")
        metrics |= rescored | prepared.serving_gap(old_R, self.version)
        if self._critic is not None and algorithm.needs_critic:
            metrics |= self._critic.train(prepared, cast(Ppo, algorithm), self.version, work)
        work.lap("critic")
        if metrics["steps_skipped"] and not metrics["steps_applied"]:
            prepared = prepared.without(prepared.trained)
        metrics |= prepared.metrics() | work.finish()
        self.version += 1
        return prepared.result(self.version, metrics, old_R, str(self._loaded.dtype).removeprefix("torch."))

    def logprobs(self, batch: Batch) -> ResponseScores:
        """Scores of a batch's response tokens under the current weights; the model can take all its transitions."""
        scores = self._scores(self._loaded.model, batch, np.arange(len(batch)), Work())
        return ResponseScores(scores.logprobs_R.double().cpu().numpy(), scores.is_top_R.cpu().numpy())

    def _reference_logprobs(self, prepared: PreparedBatch, work: Work) -> Tensor:
        if self._loaded.has_adapter:
            with self._loaded.model.disable_adapter():
                return self._logprobs(self._loaded.model, prepared, work)
        self._reference = self._reference or self._load_initial().model
        return self._logprobs(self._reference, prepared, work)

    def _teacher_logprobs(self, teacher: LoadedModel | ServedTeacher, prepared: PreparedBatch, work: Work) -> Tensor:
        if isinstance(teacher, LoadedModel):
            return self._logprobs(teacher.model, prepared, work)
        logprobs_R = torch.from_numpy(teacher.logprobs(prepared.batch, prepared.trained))
        return logprobs_R.to(self._loaded.device, self._precision)

    def _load_initial(self) -> LoadedModel:
        assert self._initial is not None, "an engine's policies have it"
        return self._initial()

    def _logprobs(self, model: Any, prepared: PreparedBatch, work: Work) -> Tensor:
        return self._scores(model, prepared.batch, prepared.trained, work).logprobs_R

    def _scores(self, model: Any, batch: Batch, chosen: NDArray[np.int64], work: Work) -> TokenScores:
        """Scores of the transitions `chosen`, without gradient; 0 elsewhere."""
        size, device = int(batch.response_offsets[-1]), self._loaded.device
        logprobs_R, entropy_R = torch.zeros(2, size, dtype=self._precision, device=device)
        scores = TokenScores(logprobs_R, entropy_R, torch.zeros(size, dtype=torch.bool, device=device))
        with torch.no_grad():
            for micro in micro_batches(batch, chosen, Limits.of(model, self.tokens_per_pass), device):
                for whole_R, part_R in zip(scores, score(model, micro, self.allowed(batch, micro)), strict=True):
                    whole_R[micro.tokens_R] = part_R.to(whole_R.dtype)
                work.advance(micro.tokens, 1)
        return scores

    def allowed(self, batch: Batch, micro: MicroBatch) -> Tensor | None:
        """[R, W] what the grammar of each response allowed at its tokens, packed; None if none has a grammar."""
        chosen = micro.transitions_n.tolist()
        if not any(batch.grammar_N[chosen]):
            return None
        grammars, masks = self._loaded.grammars, []
        for i in chosen:
            start, prompt, end = batch.offsets[i], batch.prompt_lengths_N[i], batch.offsets[i + 1]
            ids = batch.tokens_T[start:end]
            masks.append(grammars.masks(batch.grammar_N[i], ids[:prompt], ids[prompt:]))
        return torch.from_numpy(np.concatenate(masks)).to(self._loaded.device)

    def state_dict(self) -> dict[str, Any]:
        """All that later updates depend on besides the weights; tensors and plain values only."""
        device = self._loaded.device
        return {
            "version": self.version,
            "optimizer": self.optimizer.state_dict(),
            "critic": None if self._critic is None else self._critic.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the weights must be those that belong to it."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._critic = None
        if state["critic"] is not None:
            self._critic = Critic(self._load_initial(), self)
            self._critic.load_state_dict(state["critic"])
        self.version = state["version"]
        torch.set_rng_state(state["random"].cpu())
        if state["random_cuda"] is not None and self._loaded.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"].cpu(), self._loaded.device)


class Critic:
    """The policy's own architecture, from the initial weights, with a scalar head instead of the output layer.

    It is trained as the policy is: all its weights, or an adapter of the same shape on the same base. The head starts
    at zero, and so do all values. `loaded` are initial weights of its own.
    """

    def __init__(self, loaded: LoadedModel, policy: PolicyTrainer) -> None:
        self._device, self._seed = loaded.device, policy.seed
        causal = loaded.model.get_base_model() if loaded.has_adapter else loaded.model
        self._backbone: Any = causal.base_model
        self._limits = replace(Limits.of(causal, policy.tokens_per_pass), vocabulary=1)
        hidden = causal.get_output_embeddings().weight.shape[1]
        dtype = torch.promote_types(loaded.dtype, torch.float32)
        # Made on no device, because its usual random weights would advance the random state.
        self._head = nn.Linear(hidden, 1, device="meta", dtype=dtype).to_empty(device=loaded.device)
        for parameter in self._head.parameters():
            nn.init.zeros_(parameter)
        if policy.gradient_checkpointing:
            recompute_layers(self._backbone)
        self._trained = [p for module in (self._backbone, self._head) for p in module.parameters() if p.requires_grad]
        self._optimizer = PolicyOptimizer(
            self._trained, policy.optimizer.settings, training_steps=policy.optimizer.training_steps
        )

    def values(self, batch: Batch, work: Work) -> Tensor:
        """[R] values of the states before each response token, without gradient."""
        values_R = torch.zeros(int(batch.response_offsets[-1]), dtype=self._head.weight.dtype, device=self._device)
        with torch.no_grad():
            for micro in micro_batches(batch, np.arange(len(batch)), self._limits, self._device):
                values_R[micro.tokens_R] = read_values(self._backbone, self._head, micro)
                work.advance(micro.tokens, 1)
        return values_R

    def train(self, prepared: PreparedBatch, algorithm: Ppo, version: int, work: Work) -> dict[str, float]:
        """Steps towards the value targets of a batch, in minibatches that differ with `version`; returns metrics."""
        training = prepared.value
        if training is None:
            return {}
        values_R, targets_R, weights_R = training.values_R, training.targets_R, training.weights_R
        rate = {"learning_rate": algorithm.critic_learning_rate}
        self._optimizer.settings = self._optimizer.settings.model_copy(update=rate)
        self._optimizer.training_step = prepared.batch.step

        def loss_of(micro: MicroBatch, token_weights_R: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
            current_R = read_values(self._backbone, self._head, micro)
            return algorithm.value_loss(current_R, values_R[micro.tokens_R], targets_R[micro.tokens_R], token_weights_R)

        steps = minibatches(prepared.batch, prepared.trained, algorithm.minibatches, [self._seed, version])
        steps *= algorithm.critic_epochs
        measured = train(self._optimizer, prepared, weights_R, steps, self._limits, loss_of, work)
        metrics = {name if name.startswith("value_") else f"critic_{name}": value for name, value in measured.items()}
        explained = explained_variance(values_R, targets_R, prepared.corrected(weights_R))
        return metrics if np.isnan(explained) else metrics | {"explained_variance": explained}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": [weight.detach() for weight in self._trained], "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for weight, saved in zip(self._trained, state["weights"], strict=True):
                weight.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])


def train(
    optimizer: PolicyOptimizer,
    prepared: PreparedBatch,
    weights_R: Tensor,
    steps: Sequence[NDArray[np.int64]],
    limits: Limits,
    loss_of: Callable[[MicroBatch, Tensor], tuple[Tensor, Mapping[str, Tensor]]],
    work: Work,
    target_kl: float | None = None,
) -> dict[str, float]:
    """One optimizer step for each of `steps`, the transitions that it trains on.

    A step whose loss or gradient is not finite is skipped. The first step whose `kl_old` is above `target_kl` and all
    after it are left out.

    `weights_R` are token weights over the whole batch, before corrections. `loss_of` gets a micro-batch and its tokens'
    weights in the step, and returns the sum over tokens of weight × loss, and such sums of metrics (`…_max`: maxima).
    Metrics (docs/health.md): their means over the applied steps, by weight, and those of the steps themselves.
    """
    sums: dict[str, float] = {}
    weight, rate = 0.0, optimizer.learning_rate
    grad_norms: list[float] = []
    stopped_early, kl = 0, 0.0
    try:
        for number, chosen in enumerate(steps):
            step_weights_R = prepared.step_weights(weights_R, [chosen])
            step_rate, grad_norm = optimizer.learning_rate, None
            step_sums, step_weight = dict[str, float](), 0.0
            for micro in micro_batches(prepared.batch, chosen, limits, weights_R.device):
                token_weights_R = step_weights_R[micro.tokens_R]
                with torch.enable_grad():
                    loss, measured = loss_of(micro, token_weights_R)
                if not torch.isfinite(loss):
                    break
                loss.backward()  # type: ignore[no-untyped-call]
                step_weight += float(token_weights_R.sum())
                _add(step_sums, {name: tensor.detach().item() for name, tensor in measured.items()})
                work.advance(micro.tokens, 1 + BACKWARD_COST)
            else:
                kl = step_sums.get("kl_old", 0.0) / (step_weight or 1.0)
                if target_kl is not None and kl > target_kl:
                    stopped_early = len(steps) - number
                    break
                grad_norm = optimizer.step()
            if grad_norm is None:
                optimizer.discard()
                continue
            _add(sums, step_sums)
            weight, rate = weight + step_weight, step_rate
            grad_norms.append(grad_norm)
    finally:
        optimizer.discard()
    means = {name: total if name.endswith("_max") else total / weight for name, total in sums.items()}
    if grad_norms:
        means["grad_norm"] = sum(grad_norms) / len(grad_norms)
    if target_kl is not None:
        means |= {"kl_old": kl, "stopped_early": float(stopped_early)}
    return means | {
        "learning_rate": rate,
        "steps_applied": float(len(grad_norms)),
        "steps_skipped": float(len(steps) - len(grad_norms) - stopped_early),
    }


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        sums[name] = max(sums.get(name, value), value) if name.endswith("_max") else sums.get(name, 0.0) + value
