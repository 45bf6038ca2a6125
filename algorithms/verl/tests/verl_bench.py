"""One recorded batch, through the torch engine's trainer and through veRL's own training workers, with no Ray.

Everything is as in a run, but for the transport: rows, losses, weights and optimizer are those of
`agl_verl.trainer`, the workers are veRL's (FSDP2), in this process. They are made of the configuration that the
engine composes from a run's settings.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from agl_algorithms.policy_gradient import Logprobs
from agl_algorithms.prepared import lineages, minibatches, prepare, samples_of
from agl_core.config.sections import OptimizerSection
from agl_core.learning.batch import filter_trainable
from agl_core.protocols import EngineContext, PolicySpec
from agl_core.types import Batch, CreditKind
from agl_torch.loading import LoadedModel, load_model
from agl_torch.trainer import PolicyTrainer
from agl_verl.config import ChosenAlgorithm, compose
from agl_verl.environment import CPU_VARIABLE, ENGINE_VARIABLE
from agl_verl.options import VerlOptions
from agl_verl.rows import (
    OLD_LOGPROBS,
    STEP_WEIGHT,
    TOTAL_LOSS,
    TRAINING_STEP,
    Chain,
    actor_loss,
    critic_loss,
    fields_of,
    gather,
    join,
    lay_out,
    row_of,
)
from tests.support.engine_parity import Made
from tests.support.recorded_batches import TOO_LONG, record

LEARNING_RATE = 3e-5
"""With random tokens a larger one makes ratios that overflow any clipping."""
TRAINING_STEPS = 4
"""Of the run: what the schedule of the step size goes by."""
RESPONSE_FIELDS = ("response_mask", "loss_mask", "rollout_log_probs")
TIED = "lm_head.weight"
"""Of a model with tied embeddings veRL tells them twice."""


def one_process() -> None:
    """Be veRL's only worker, on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        {
            ENGINE_VARIABLE: "1",
            CPU_VARIABLE: "1",
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",
            "HF_HUB_OFFLINE": "1",
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("cpu:gloo", rank=0, world_size=1)


def recorded_batch(
    vocabulary: int, kind: CreditKind = CreditKind.RETURN, seed: int = 0, rollouts: int = 9, step: int = 0
) -> Batch:
    """The batch of `recorded_batches.record`, as that of a training step."""
    return replace(record(vocabulary, kind, seed, rollouts), step=step)


def optimizer() -> OptimizerSection:
    return OptimizerSection(learning_rate=LEARNING_RATE, max_grad_norm=1.0, schedule="cosine")


def nested(rows: Iterable[Tensor]) -> Tensor:
    """One jagged tensor of rows."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of all their values."""
    return torch.cat([tensor.detach().flatten().to("cpu", torch.float32) for tensor in tensors])


class TorchBench:
    """The torch engine's trainer, for one algorithm on one model."""

    def __init__(self, model: Path, name: str, options: Mapping[str, Any]) -> None:
        self._spec = PolicySpec(model=str(model), dtype="float32")
        self._loaded = replace(self._fresh(), context_length=TOO_LONG)
        self._algorithm = ChosenAlgorithm.of(name, options).build()
        self._trainer = PolicyTrainer(
            self._loaded, optimizer(), steps=TRAINING_STEPS, tokens_per_micro_batch=4096, initial=self._fresh
        )

    def update(self, batch: Batch) -> Made:
        """One update, as in a run."""
        before, critic_before = flat(self._loaded.model.parameters()), self._critic()
        result = self._trainer.update(batch, self._algorithm)
        critic = self._critic()
        critic_change = None if critic is None or critic_before is None else critic - critic_before
        return Made(result, flat(self._loaded.model.parameters()) - before, critic_change)

    def _critic(self) -> Tensor | None:
        """All weights of the critic; before its first update those that it will start from."""
        if not self._algorithm.needs_critic:
            return None
        if self._trainer._critic is None:
            head = torch.zeros(self._loaded.model.config.hidden_size + 1)
            return flat([*self._fresh().model.base_model.parameters(), head])
        return flat(self._trainer._critic._trained)

    def _fresh(self) -> LoadedModel:
        return load_model(self._spec, torch.device("cpu"), 0)


class VerlBench:
    """veRL's workers for one algorithm on one model; calls that continue each other are one row, or a row each."""

    def __init__(
        self,
        model: Path,
        name: str,
        options: Mapping[str, Any],
        *,
        joins_calls: bool = True,
        scores_first: bool = False,
        longest: int = TOO_LONG,
        overrides: tuple[str, ...] = (),
    ) -> None:
        """`scores_first`: compute old log-probabilities before an update's only optimizer step too."""
        one_process()
        self.joins_calls, self.longest = joins_calls, longest
        self.chosen = ChosenAlgorithm.of(name, options)
        self.algorithm = self.chosen.build()
        scores_first |= self.algorithm.needs_scores
        self.once = self.algorithm.epochs * self.algorithm.minibatches == 1 and not scores_first
        self.version = 0
        config = configuration(model, self.chosen, max(512, longest), overrides)
        self.actor = _worker(config, "actor")
        self.actor.set_loss_fn(partial(actor_loss, self.chosen))
        self.reference = _worker(config, "ref") if self.algorithm.needs_reference else None
        self.critic = None
        if self.algorithm.needs_critic:
            self.critic = _critic(config)
            self.critic.set_loss_fn(partial(critic_loss, self.chosen))

    def update(
        self,
        batch: Batch,
        vocabulary: int,
        pads: int = 3,
        *,
        others: Collection[int] = (),
    ) -> Made:
        """`AglTrainer.update` with its rows; of one optimizer step, with `pads` pad rows after the others.

        `others`: places of rows that have other tokens.
        """
        usable = filter_trainable(batch, context_length=self.longest, vocabulary=vocabulary)
        whole, samples = usable.batch, samples_of(usable.batch)
        prepared = None if self.critic is not None else prepare(usable, samples, self.algorithm)
        sent = np.arange(len(whole)) if prepared is None else prepared.trained
        steps = list(minibatches(whole, sent, self.algorithm.minibatches, [0, self.version]))
        chains = lineages(whole, sent) if self.joins_calls else list(sent[:, None])
        row_of_transition = {int(i): row for row, chain in enumerate(chains) for i in chain}
        order = lay_out([np.unique([row_of_transition[int(i)] for i in step]) for step in steps], 1, lambda r, _: [r])
        if len(steps) == 1:
            order += range(len(order), len(order) + pads)
        of_rows = [chains[row] if row < len(chains) else None for row in order]
        data = self.rows(whole, of_rows, others=others, vocabulary=vocabulary)
        old = [] if self.once else self.infer(self.actor, data, "log_probs")
        if not self.once:
            data["old_log_probs"] = nested(old)
        if self.reference is not None:
            data["ref_log_prob"] = nested(self.infer(self.reference, data, "log_probs"))
        if prepared is None:
            values = self.infer(self.critic, data, "values")
            data["values"] = nested(values)
            prepared = prepare(usable, samples, self.algorithm, gather(whole, values, of_rows))
        rescored: Mapping[str, float] = {}
        if self.algorithm.needs_scores:
            old_R, reference_R = (
                gather(whole, data[name].unbind(), of_rows) for name in ("old_log_probs", "ref_log_prob")
            )
            prepared, rescored = prepared.rescored(self.algorithm, Logprobs(old_R, old_R, old_R, reference_R))
        for field, values in fields_of(prepared, steps, of_rows).items():
            data[field] = nested(values)

        def train(worker: Any, epochs: int, weights_R: Tensor) -> tuple[dict[str, Any], Tensor]:
            weight = float(prepared.step_weights(weights_R, steps).sum()) / len(steps)
            before = self.parameters(worker)
            measured = self.train(worker, data, epochs, weight, len(steps), batch.step)
            return measured, self.parameters(worker) - before

        of_critic, critic_change = {}, None
        if self.critic is not None:
            of_critic, critic_change = train(self.critic, self.algorithm.critic_epochs, prepared.value.weights_R)
        measured, change = train(self.actor, self.algorithm.epochs, prepared.weights_R)
        self.version += 1
        parts = measured.pop(OLD_LOGPROBS, None)
        metrics = {**of_critic, **measured, "loss": measured[TOTAL_LOSS], **rescored}
        result = prepared.result(1, metrics, gather(whole, old, of_rows) if parts is None else join(samples, parts))
        return Made(result, change, critic_change, tuple(n for n, chain in enumerate(of_rows) if chain is None))

    def rows(
        self, whole: Batch, chains: Sequence[Chain | None], others: Collection[int] = (), vocabulary: int = 0
    ) -> Any:
        """The rows of these chains as veRL's workers get them from TransferQueue; None: a pad row."""
        from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        rows = [None if chain is None else row_of(whole, chain) for chain in chains]
        first = next(row for row in rows if row is not None)
        pad, _ = construct_minimal_padding_template(first, {}, eos_token_id=0)
        fields = [dict(pad if row is None else row) for row in rows]
        random = torch.Generator().manual_seed(5)
        for n in others:
            prompt, tokens = len(fields[n]["prompts"]), fields[n]["input_ids"]
            tokens = torch.randint(vocabulary, tokens.shape, generator=random)
            fields[n] |= {"input_ids": tokens, "prompts": tokens[:prompt], "responses": tokens[prompt:]}
        data = list_of_dict_to_tensordict(fields)
        for name in ("prompts", "responses", "input_ids", "position_ids", *RESPONSE_FIELDS):
            data[name] = nested([row[name] for row in fields])  # TransferQueue's are ragged, also if lengths are equal.
        return data

    def infer(self, worker: Any, data: Any, output: str) -> Sequence[Tensor]:
        """By row, log-probabilities or values of its response."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import response_from_nested

        inputs = data.clone()
        tu.assign_non_tensor(inputs, calculate_entropy=False, compute_loss=False, temperature=0.8)
        output_of_worker = tu.get(worker.infer_batch(inputs), output)
        return list(response_from_nested(output_of_worker, data["response_mask"]).to("cpu", torch.float32).unbind())

    def train(
        self, worker: Any, data: Any, epochs: int, weight: float, steps: int, training_step: int
    ) -> dict[str, Any]:
        """As many passes, each of as many optimizer steps; means over them."""
        from verl.utils import tensordict_utils as tu
        from verl.utils.metric import reduce_metrics

        inputs = data.clone()
        tu.assign_non_tensor(
            inputs,
            temperature=0.8,
            global_batch_size=len(data) // steps,
            mini_batch_size=len(data) // steps,
            calculate_entropy=worker is self.actor,
            epochs=epochs,
            seed=0,
            dataloader_kwargs={"shuffle": False},
            **{STEP_WEIGHT: weight, TRAINING_STEP: training_step},
        )
        metrics = dict(tu.get(worker.train_mini_batch(inputs), "metrics"))
        parts = {OLD_LOGPROBS: metrics.pop(OLD_LOGPROBS)} if OLD_LOGPROBS in metrics else {}
        return {name: float(value) for name, value in reduce_metrics(metrics).items()} | parts

    @staticmethod
    def parameters(worker: Any) -> Tensor:
        """All of them, in the model's order."""
        generator, _ = worker.engine.get_per_tensor_param()
        return flat(tensor for name, tensor in generator if name != TIED)


def configuration(model: Path, chosen: ChosenAlgorithm, size: int = 512, overrides: tuple[str, ...] = ()) -> Any:
    """veRL's whole configuration as the engine makes it of a run's settings."""
    policy = PolicySpec(str(model), "float32", optimizer=optimizer().model_dump(), algorithm=chosen.name)
    context = EngineContext(Path("unused"), 0, {"default": policy}, False, (), "key", TRAINING_STEPS)
    settings = VerlOptions(device="cpu", gradient_checkpointing=False, tokens_per_micro_batch=size, overrides=overrides)
    return compose(settings, context, algorithm=chosen.build(), cpu=True)


def _worker(config: Any, role: str) -> Any:
    """veRL's worker of the policy ("actor") or of the reference ("ref"), as it makes it of its configuration."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role=role)
    forward = Qwen2ForCausalLM.forward
    worker.init_model()
    trained = worker.actor if role == "actor" else worker.ref
    # veRL changes the class of the model, which is the torch engine's too: leave the change to this one.
    module = trained.engine.module
    module.forward, Qwen2ForCausalLM.forward = module.forward, forward
    return trained


def _critic(config: Any) -> Any:
    """As veRL's trainer makes it (`PPOTrainer.init_workers`)."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    critic = omega_conf_to_dataclass(config.critic)
    critic.engine.infer_max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    critic.engine.max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    worker = TrainingWorker(
        config=TrainingWorkerConfig(
            model_type="value_model",
            model_config=critic.model,
            engine_config=critic.engine,
            optimizer_config=critic.optim,
            checkpoint_config=critic.checkpoint,
        )
    )
    worker.reset()
    return worker
