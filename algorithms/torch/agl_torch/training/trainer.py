"""One update of one policy: validate, value, compare, weigh, step; and writing the policy to a folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from agl_algorithms.interface import Algorithm, CriticAlgorithm, Logprobs, Samples
from agl_algorithms.prepared import Prepared, minibatches, prepare, samples_of
from agl_core.config.defaults import usual_learning_rate
from agl_core.config.policies import OptimizerSection
from agl_core.errors import CheckpointError, EngineError
from agl_core.learning.batch import filter_trainable
from agl_core.protocols import Progress, UpdateResult
from agl_core.types import Batch
from agl_torch.models.loading import LoadedModel, is_of_other_base, write_base
from agl_torch.training.batching import Limits, MicroBatch, micro_batches, score
from agl_torch.training.critic import Critic
from agl_torch.training.optimizer import BACKWARD_COST, PolicyOptimizer, Work, train


class PolicyTrainer:
    """Trains one policy's weights in place; call it from the one thread that also samples from them.

    `initial` loads the initial weights once more, for what an algorithm needs beside the policy: a frozen reference
    (a policy with an adapter has its own below the adapter), and a critic. Neither exists before it is needed.
    `steps` is how many training steps the run has: what a schedule of the step size ends with.
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
        self.version = 0
        trained = [weight for weight in loaded.model.parameters() if weight.requires_grad]
        if settings.learning_rate is None:
            rate = usual_learning_rate(loaded.size, adapter=loaded.has_adapter)
            settings = settings.model_copy(update={"learning_rate": rate})
        self.optimizer = PolicyOptimizer(trained, settings, training_steps=steps)
        self._steps = steps
        self._loaded = loaded
        self._limits = Limits.of(loaded.model, tokens_per_micro_batch, loaded.context_length)
        self._seed = seed
        self._gradient_checkpointing = gradient_checkpointing
        self._initial = initial
        self._reference: Any = None
        self._critic: Critic | None = None
        if gradient_checkpointing:
            loaded.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of one forward pass at most."""
        return self._limits.tokens

    def update(self, batch: Batch, algorithm: Algorithm, progress: Progress | None = None) -> UpdateResult:
        """Train on a batch; the version grows by one, also when nothing in the batch could be trained on.

        The same batch, weights and optimizer state give the same result. An optimizer step whose loss or gradient
        is not finite is skipped and counted. `progress` gets the share of the work done, 0 … 1.

        Metrics (means are over the trained tokens of all optimizer steps, by their weight in the loss; the first three
        are absent if no step was applied):

        - loss, and whatever the algorithm's loss reports: policy_loss, kl_reference, kl_behaviour, clip_fraction,
          ratio_mean, ratio_max for GRPO;
        - entropy: of the policy's distribution, nats per token;
        - grad_norm: before clipping, the mean over optimizer steps;
        - learning_rate: of the last step;
        - advantage_mean, advantage_std, advantage_abs_max: over the trained transitions;
        - logprob_gap_max, prob_gap_mean, …: those of `agl_algorithms.prepared.Prepared.serving_gap`;
        - with a critic, those of `agl_torch.training.critic.Critic.train`: value_loss, explained_variance, …;
        - tokens_trained, transitions_trained: what the loss was computed on; transitions_dropped: the others;
        - steps_applied, steps_skipped: optimizer steps;
        - seconds_prepare, seconds_values, seconds_reference, seconds_old, seconds_train, seconds_critic,
          seconds_update (all of it).
        """
        work = Work(progress)
        once = algorithm.epochs == 1 and algorithm.minibatches == 1
        usable = filter_trainable(batch, context_length=self._loaded.context_length, vocabulary=self._loaded.vocabulary)
        precision = torch.promote_types(self._loaded.dtype, torch.float32)
        samples = samples_of(usable.batch, dtype=precision, device=self._loaded.device)
        work.lap("prepare")
        values_R = self._values(usable.batch, algorithm, once, work) if algorithm.needs_critic else None
        work.lap("values")
        prepared = prepare(usable, samples, algorithm, values_R)
        work.total = work.done + _cost(_tokens(prepared.batch)[prepared.trained].sum(), algorithm, once)
        work.lap("prepare")
        reference_R = self._reference_logprobs(prepared, work) if algorithm.needs_reference else None
        work.lap("reference")
        if once:  # Each token's current log-probability is its old one, so it is known when the loss needs it.
            old_R = torch.full_like(samples.behaviour_R, torch.nan)
        else:
            old_R = self._logprobs(self._loaded.model, prepared.batch, prepared.trained, work)
        work.lap("old")
        self.optimizer.training_step = batch.step

        def loss_of(micro: MicroBatch, token_weights_R: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
            scores, tokens_R = score(self._loaded.model, micro), micro.tokens_R
            if once:
                old_R[tokens_R] = scores.logprobs_R.detach()
            behaviour_R = samples.behaviour_R[tokens_R]
            logprobs = Logprobs(
                current_R=scores.logprobs_R,
                old_R=old_R[tokens_R],
                behaviour_R=torch.where(behaviour_R.isnan(), old_R[tokens_R], behaviour_R),
                reference_R=None if reference_R is None else reference_R[tokens_R],
            )
            advantages_R = prepared.advantages_R[tokens_R]
            loss, measured = algorithm.loss(_samples_of(micro, samples), logprobs, advantages_R, token_weights_R)
            return loss, {"loss": loss, "entropy": (token_weights_R * scores.entropy_R).sum(), **measured}

        seed = [self._seed, self.version]
        steps = (
            chosen
            for _ in range(algorithm.epochs)
            for chosen in minibatches(prepared.batch, prepared.trained, algorithm.minibatches, seed)
        )
        model, weights_R = self._loaded.model, prepared.weights_R
        metrics = train(model, self.optimizer, prepared, weights_R, steps, self._limits, loss_of, work)
        work.lap("train")
        metrics |= prepared.metrics() | prepared.serving_gap(old_R, self.version)
        if self._critic is not None and algorithm.needs_critic:
            metrics |= self._critic.train(prepared, cast(CriticAlgorithm, algorithm), self.version, work)
        work.lap("critic")
        self.version += 1
        work.finish()
        return prepared.result(self.version, metrics | work.seconds())

    def logprobs(self, batch: Batch) -> NDArray[np.float64]:
        """[R] the log-probability of each response token of a batch, each of whose transitions the model can take."""
        logprobs_R = self._logprobs(self._loaded.model, batch, np.arange(len(batch)), Work(None))
        return np.asarray(logprobs_R.double().cpu().numpy())

    def _reference_logprobs(self, prepared: Prepared, work: Work) -> Tensor:
        batch, trained = prepared.batch, prepared.trained
        if self._loaded.has_adapter:
            with self._loaded.model.disable_adapter():
                return self._logprobs(self._loaded.model, batch, trained, work)
        if self._reference is None:
            self._reference = self._load_initial().model
        return self._logprobs(self._reference, batch, trained, work)

    def _values(self, batch: Batch, algorithm: Algorithm, once: bool, work: Work) -> Tensor:
        """[R] the critic's, of all usable transitions."""
        if self._critic is None:
            self._critic = self._make_critic()
        tokens = int(_tokens(batch).sum())
        work.total = tokens + _cost(tokens, algorithm, once)
        return self._critic.values(batch, work)

    def _make_critic(self) -> Critic:
        return Critic(
            self._load_initial(),
            self.optimizer.settings,
            steps=self._steps,
            tokens_per_micro_batch=self._limits.tokens,
            gradient_checkpointing=self._gradient_checkpointing,
            seed=self._seed,
        )

    def _load_initial(self) -> LoadedModel:
        if self._initial is None:
            raise EngineError("The algorithm needs the initial weights, and this policy was given none.")
        return self._initial()

    def _logprobs(self, model: Any, batch: Batch, chosen: NDArray[np.int64], work: Work) -> Tensor:
        """[R] of the transitions `chosen`, without gradient; 0 elsewhere."""
        dtype = torch.promote_types(self._loaded.dtype, torch.float32)
        logprobs_R = torch.zeros(int(batch.response_offsets[-1]), dtype=dtype, device=self._loaded.device)
        with torch.no_grad():
            for micro in micro_batches(batch, chosen, self._limits, self._loaded.device):
                logprobs_R[micro.tokens_R] = score(model, micro).logprobs_R
                work.advance(micro.tokens, 1)
        return logprobs_R

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights that later updates depend on; tensors and plain values only."""
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
            self._critic = self._make_critic()
            self._critic.load_state_dict(state["critic"])
        self.version = state["version"]
        torch.set_rng_state(state["random"].cpu())
        if state["random_cuda"] is not None and self._loaded.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"].cpu(), self._loaded.device)


def _tokens(batch: Batch) -> NDArray[np.int64]:
    """[N] prompt and response together."""
    return np.diff(batch.offsets)


def _cost(tokens: int, algorithm: Algorithm, once: bool) -> float:
    """Of an update on so many trained tokens, in forward passes over one token, for the progress bar."""
    passes = (1 + BACKWARD_COST) * algorithm.epochs + algorithm.needs_reference + (not once)
    if algorithm.needs_critic:
        passes += (1 + BACKWARD_COST) * cast(CriticAlgorithm, algorithm).critic_epochs
    return float(tokens * passes)


def _samples_of(micro: MicroBatch, samples: Samples) -> Samples:
    """The samples of one micro-batch, transitions renumbered as it numbers them."""
    rows = micro.transitions_n
    return Samples(
        transition_R=micro.transition_R,
        mask_R=samples.mask_R[micro.tokens_R],
        behaviour_R=samples.behaviour_R[micro.tokens_R],
        values_N=samples.values_N[rows],
        scores_N=samples.scores_N[rows],
        group_N=samples.group_N[rows],
        rollout_N=samples.rollout_N[rows],
        turn_N=samples.turn_N[rows],
    )


FORMAT = 1


def save_policy(folder: Path, loaded: LoadedModel, trainer: PolicyTrainer) -> None:
    """Write a policy; `folder` exists whole or not at all, an earlier one is replaced."""
    partial = folder.with_name(f".{folder.name}.partial")
    superseded = folder.with_name(f".{folder.name}.superseded")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in (partial, superseded):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        # The embeddings are the base's: to find that out, peft would look for the base, on the hub too.
        of_adapter = {"save_embedding_layers": False} if loaded.has_adapter else {}
        loaded.model.save_pretrained(partial / "model", safe_serialization=True, **of_adapter)
        loaded.tokenizer.save_pretrained(partial / "model")
        if loaded.has_adapter:
            write_base(partial / "model", loaded.model)
        torch.save(trainer.state_dict(), partial / "trainer.pt")
        (partial / "checkpoint.json").write_text(json.dumps({"format": FORMAT, **_kind(loaded)}), encoding="utf-8")
        if folder.exists():
            os.replace(folder, superseded)
        os.replace(partial, folder)
        shutil.rmtree(superseded, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"The checkpoint {folder} cannot be written: {error}. Make room or choose a folder that you may write to."
        ) from error


def load_policy(folder: Path, loaded: LoadedModel, trainer: PolicyTrainer) -> None:
    """Restore what `save_policy` wrote, into the same model object."""
    try:
        described = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no checkpoint of the torch engine: {error}.") from error
    if described.get("format") != FORMAT:
        raise CheckpointError(
            f"The checkpoint {folder} has format {described.get('format')}, this version reads {FORMAT}. "
            f"Use the version of agl-torch that wrote it."
        )
    kind = _kind(loaded)
    different = [f"{key} was {described.get(key)}, now {now}" for key, now in kind.items() if described.get(key) != now]
    if different:
        raise CheckpointError(
            f"The checkpoint {folder} belongs to another configuration ({'; '.join(different)}). "
            f"Resume with the model, dtype and lora settings it was saved with."
        )
    if loaded.has_adapter and is_of_other_base(folder / "model", loaded.model):
        raise CheckpointError(
            f"The checkpoint {folder} has an adapter of other weights than those that are loaded now. Resume with the "
            f"weights that the run started from."
        )
    try:
        state = torch.load(folder / "trainer.pt", map_location=loaded.device, weights_only=True)
        _load_weights(folder / "model", loaded)
        trainer.load_state_dict(state)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError, SafetensorError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(
            f"The checkpoint {folder} is damaged or belongs to another model ({reason}). Resume from an earlier one."
        ) from error


def _kind(loaded: LoadedModel) -> dict[str, Any]:
    return {
        "model": loaded.model.config.model_type,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "lora": loaded.has_adapter,
    }


def _load_weights(folder: Path, loaded: LoadedModel) -> None:
    if loaded.has_adapter:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        weights = load_file(folder / "adapter_model.safetensors", device=str(loaded.device))
        result: Any = set_peft_model_state_dict(loaded.model, weights)
        if result.unexpected_keys:
            raise ValueError(f"unknown adapter weights, such as {result.unexpected_keys[0]}")
        return
    saved = type(loaded.model).from_pretrained(folder, dtype=loaded.dtype)
    loaded.model.load_state_dict(saved.state_dict())
