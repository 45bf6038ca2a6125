"""veRL's V1 trainer, driven from outside: one update at a time, with agl's algorithms. Imports veRL.

Workers, optimizer, sharding, serving and the exchange of weights are veRL's. agl decides here where transitions come
from, what they weigh, which rows make one optimizer step, and that a reply is of one policy version.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from transfer_queue import KVBatchMeta
from transformers import AutoConfig
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainer, PPOTrainerColocateAsync, PPOTrainerSeparateAsync, register_trainer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.utils.padding import response_from_nested

from agl_algorithms.policy_gradient import Logprobs
from agl_algorithms.ppo import Ppo
from agl_algorithms.prepared import PreparedBatch, lineages, minibatches, prepare, samples_of
from agl_core.learning.batch import TrainableBatch, filter_trainable
from agl_core.protocols import Progress, ResponseScores, UpdateResult
from agl_core.types import Batch
from agl_verl import rows
from agl_verl.config import ACTOR, CRITIC, SEPARATE, SHARED, ChosenAlgorithm
from agl_verl.rows import OLD_LOGPROBS, STEP_WEIGHT, TRAINING_STEP, Update, actor_loss, critic_loss, named, row_of
from agl_verl.verl_plugin import StepSizes, mark_top_tokens

PARTITION = "train"
SECONDS_TO_ANSWER = 60.0
"""A server on a busy machine, or amid an exchange of weights, takes its time; one that is gone is missed at once."""


@dataclass
class Policy:
    """A policy as the driver knows it; its weights are with the workers."""

    name: str
    chosen: ChosenAlgorithm
    optimizers: Mapping[str, Mapping[str, Any]]
    """veRL's settings, by role: of the policy and of its critic."""
    version: int = 0


@dataclass
class Adapter:
    """The parts of a model engine of veRL's that training changes."""

    weights: list[Tensor]
    """This worker's part of each."""
    moments: Any
    sizes: dict[str, Any]
    """Counts of optimizer steps."""
    settings: Any
    """The optimizer's settings."""


class AdapterWorker(TrainingWorker):  # type: ignore[misc]
    """Trains adapters on one base, or their critics, by turns: one is in the model engine, the others lie aside."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._held = ""
        self._aside: dict[str, Adapter] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def hold(self, policy: str, settings: Mapping[str, Any]) -> None:
        """Put a policy into the engine; `settings` of its optimizer. All are held once before any is trained."""
        if policy == self._held:
            return
        engine, optimizer, sizes = self.engine, self.engine.optimizer, self.engine.lr_scheduler
        trained = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
        weights = [weight.detach() for weight in trained]
        weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
        copies = [weight.clone() for weight in weights]
        self._aside[self._held] = Adapter(copies, optimizer.state, {**vars(sizes)}, engine.optimizer_config)
        if policy not in self._aside:
            chosen = replace(engine.optimizer_config, **settings)
            for group in optimizer.param_groups:
                group["lr"] = chosen.lr
            self._aside[policy] = Adapter(copies, defaultdict(dict), vars(StepSizes(optimizer, chosen)), chosen)
        self._held, adapter = policy, self._aside.pop(policy)
        for weight, copy in zip(weights, adapter.weights, strict=True):
            weight.copy_(copy)
        optimizer.state, engine.optimizer_config = adapter.moments, adapter.settings
        vars(sizes).update(adapter.sizes)
        for group in optimizer.param_groups:
            group["weight_decay"] = adapter.settings.weight_decay


class PolicyWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """Trains policies by turns, and sends weights to the servers."""

    actor_worker_cls = AdapterWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def hold(self, policy: str, settings: Mapping[str, Any]) -> None:
        self.actor.hold(policy, settings)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))  # type: ignore[untyped-decorator]
    def score(self, data: TensorDict) -> TensorDict | None:
        """The log-probabilities of the rows' tokens after their prompts, marked by `mark_top_tokens`."""
        with mark_top_tokens():
            output = self.compute_log_prob(data)
        if output is not None:
            output["marked_log_probs"] = response_from_nested(output.pop("log_probs"), data["response_mask"])
        return output


class AglTrainer(PPOTrainer):  # type: ignore[misc]
    """Makes updates, and serves what comes of them; a subclass says where.

    veRL's hook `on_sample_end` is before weights are trained, and `on_step_end` brings them to the servers.
    """

    @property
    def servers(self) -> LLMServerManager:
        """Servers that answer model calls, on the GPUs that train."""
        return self.llm_server_manager

    def start(
        self, policies: Sequence[Policy], seed: int, sequence_parallel: int, stage: Callable[[str], None]
    ) -> None:
        """Bring up workers and servers. `stage` gets what is done from now on."""
        self._stage, self._sequence_parallel, self._seed = stage, sequence_parallel, seed
        self.policies = {policy.name: policy for policy in policies}
        self.global_steps = 0
        self.timing_raw: dict[str, float] = {}
        stage("loading the weights into the training workers, and starting vLLM")
        self.init()
        self._joins_calls = self._can_join_calls()
        served = ray.get(self.servers.server_handles[0].get_rollout_config.remote())
        self.context_length = int(served.max_model_len)

    def hold(self, name: str) -> None:
        """Have a policy in the workers: its weights and optimizer, and agl's losses for its algorithm."""
        self._policy = policy = self.policies[name]
        self._algorithm = policy.chosen.build()
        steps = self._algorithm.epochs * self._algorithm.minibatches
        self._once = steps == 1 and not self._algorithm.needs_scores
        self.use_critic, self.use_reference_policy = self._algorithm.needs_critic, self._algorithm.needs_reference
        self.actor_rollout_wg.set_loss_fn(partial(actor_loss, policy.chosen))
        if self.use_critic:
            self.critic_wg.set_loss_fn(partial(critic_loss, policy.chosen))
        if len(self.policies) > 1:
            self.actor_rollout_wg.hold(name, policy.optimizers[ACTOR])
            if self.use_critic:
                self.critic_wg.hold(name, policy.optimizers[CRITIC])

    def update(self, name: str, batch: Batch, progress: Progress) -> UpdateResult:
        """Train a policy on a batch and serve its new version; it grows also when nothing could be trained on."""
        self._progress = progress
        self.hold(name)
        usable = self._usable(batch)
        samples = samples_of(usable.batch)
        prepared = None if self._algorithm.needs_critic else prepare(usable, samples, self._algorithm)
        sent = np.arange(len(usable.batch)) if prepared is None else prepared.trained
        self._update = Update(usable, samples, prepared, sent, [], {})
        metrics: dict[str, Any] = {}
        self.timing_raw = {}
        step = self._policy.version + 1
        if len(sent):
            self.global_steps = step
            self.config.actor_rollout_ref.rollout.temperature = rows.temperature_of(usable.batch, sent)
            done = self._step_once(metrics, self.timing_raw, len(sent))
            progress(0.8)
            self.on_step_end()
            tq.kv_clear(keys=done.keys, partition_id=done.partition_id)
        else:  # The weights are those of before, under the next number.
            self._expect()
            ray.get([server.set_global_steps.remote(step) for server in self.servers.server_handles])
        prepared, old_R = self._update.prepared or PreparedBatch.of_nothing(usable, samples), self._update.old_R
        gap = {} if old_R is None else prepared.serving_gap(old_R, self._policy.version)
        self._policy.version = step
        seconds = {f"seconds_{name}": value for name, value in self.timing_raw.items()}
        measured = {**named(metrics), **self._update.rescored, **seconds, **prepared.metrics(), **gap}
        return prepared.result(step, measured, old_R, self.config.actor_rollout_ref.rollout.dtype)

    def logprobs(self, name: str, batch: Batch) -> ResponseScores:
        """Under the weights as they are, NaN where a transition does not fit; the servers go on as before."""
        self.hold(name)
        self.global_steps = self._policy.version
        usable = self._usable(batch)
        everything = np.arange(len(usable.batch))
        self._update = Update(usable, samples_of(usable.batch), None, everything, [], {})
        marked_R = np.full(int(batch.response_offsets[-1]), np.nan)
        if len(everything):
            temperature = rows.temperature_of(usable.batch, everything)
            stored, _ = self.sample()
            self.on_sample_end()
            stored = self._balance_batch(stored, {})
            stored.extra_info.update(compute_loss=False, temperature=temperature)
            self.actor_rollout_wg.score(stored)
            is_usable_R = np.repeat(np.isin(np.arange(len(batch)), usable.places), batch.response_lengths_N)
            marked_R[is_usable_R] = self._gather(stored, "marked_log_probs").numpy()
            self.on_step_end()
            tq.kv_clear(keys=stored.keys, partition_id=stored.partition_id)
        kernels = self.config.actor_rollout_ref.model.fused_kernel_options.impl_backend
        are_marked = self.config.model_engine == "dp" and kernels == "torch"
        return ResponseScores(-np.abs(marked_R), marked_R >= 0 if are_marked else None)

    def save(self, name: str, folder: Path) -> None:
        """Write shards of weights, optimizer and random state, and the policy's weights for Hugging Face."""
        self.hold(name)
        self.actor_rollout_wg.save_checkpoint(str(folder / "actor"), None, self._policy.version)
        if self.use_critic:
            self.critic_wg.save_checkpoint(str(folder / "critic"), None, self._policy.version)

    def load(self, name: str, folder: Path, version: int) -> None:
        """Restore what `save` wrote, and serve it as this version."""
        self.hold(name)
        self.on_sample_end()
        self.actor_rollout_wg.load_checkpoint(str(folder / "actor"), del_local_after_load=False)
        if self.use_critic:
            self.critic_wg.load_checkpoint(str(folder / "critic"), del_local_after_load=False)
        self._policy.version = self.global_steps = version
        self.on_step_end()

    def counters(self) -> Counter[str]:
        asked = [server.counters.remote() for server in self.servers.server_handles]
        totals = Counter[str]()
        for counters in ray.get(asked, timeout=SECONDS_TO_ANSWER):
            totals.update(counters)
        return totals

    # What veRL calls.

    def _init_dataloader(self) -> None:
        """There are no prompts to load: tasks are agl's."""
        self.total_training_steps = self.config.trainer.total_training_steps

    def _load_checkpoint(self) -> None:
        """A run says which: `load`. Workers and servers are up."""
        self._stage("bringing the weights to vLLM")

    def on_init_end(self) -> None:
        for number, name in enumerate(self.policies):
            if number:
                self.on_sample_end()
            self.hold(name)
            self.on_step_end()

    def on_step_end(self) -> None:
        self._expect()
        super().on_step_end()

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = ray.remote(AdapterWorker if role is Role.Critic else PolicyWorker)

    def _build_replay_buffer(self) -> AglTrainer:
        """Nothing is replayed, or waited for: `sample` knows the update's rows."""
        return self

    def sample(self, **unused: Any) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Put the update's rows into TransferQueue, for veRL's workers. There are no metrics of that."""
        update, batch = self._update, self._update.usable.batch
        chains = lineages(batch, update.sent) if self._joins_calls else list(update.sent[:, None])
        sent = [row_of(batch, chain) for chain in chains]
        update.chains = {f"{self.global_steps}_{chain[0]}": chain for chain in chains}
        keys, tags = list(update.chains), [{"seq_len": len(row["input_ids"])} for row in sent]
        tq.kv_batch_put(keys=keys, tags=tags, fields=list_of_dict_to_tensordict(sent), partition_id=PARTITION)
        return KVBatchMeta(keys=keys, tags=tags, partition_id=PARTITION), {}

    def _balance_batch(self, batch: KVBatchMeta, metrics: Any, *unused: Any, **settings: Any) -> KVBatchMeta:
        """Deal the rows out: an optimizer step has those of whole rollouts, and each worker equally many."""
        update = self._update
        seed = [self._seed, self._policy.version]
        update.steps = minibatches(update.usable.batch, update.sent, self._algorithm.minibatches, seed)
        row_of_transition = {int(i): row for row, key in enumerate(batch.keys) for i in update.chains[key]}
        lengths = [tag["seq_len"] for tag in batch.tags]

        def divide(chosen: list[int], workers: int) -> list[list[int]]:
            sizes = torch.tensor([lengths[row] if row < len(lengths) else min(lengths) for row in chosen])
            divided = get_seqlen_balanced_partitions(calculate_workload(sizes), workers, equal_size=True)
            return [[chosen[i] for i in part] for part in divided]

        steps = [np.unique([row_of_transition[i] for i in step.tolist()]) for step in update.steps]
        workers = 1 + max(self.actor_rollout_wg._query_dispatch_info("actor"))
        layout = rows.lay_out(steps, workers, divide)
        batch = upsample_batch_to_divisible_size(batch, len(layout), self.tokenizer.eos_token_id)
        batch.reorder(layout)
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """For one optimizer step nothing: its own pass is under the old weights (`agl_verl.rows.actor_loss`)."""
        return batch if self._once else PPOTrainer._compute_old_log_prob(self, batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._progress(0.2)
        update = self._update
        if update.prepared is None:
            values_R = self._gather(batch, "values")
            update.prepared = prepare(update.usable, update.samples, self._algorithm, values_R)
        if self._algorithm.needs_scores:
            old_R = self._gather(batch, "old_log_probs")
            reference_R = self._gather(batch, "ref_log_prob") if self._algorithm.needs_reference else None
            logprobs = Logprobs(old_R, old_R, old_R, reference_R)
            update.prepared, update.rescored = update.prepared.rescored(self._algorithm, logprobs)
        fields = rows.fields_of(update.prepared, update.steps, update.of_rows(batch.keys))
        nested = {name: torch.nested.as_nested_tensor(field, layout=torch.jagged) for name, field in fields.items()}
        tensors = TensorDict(nested, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=tensors)

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        prepared = self._update.prepared
        assert prepared is not None
        assert prepared.value is not None
        self._plan_training(batch, prepared, prepared.value.weights_R, cast(Ppo, self._algorithm).critic_epochs)
        output = self.critic_wg.train_mini_batch(batch).get()
        metrics.update(reduce_metrics(rename_dict(output["metrics"], "critic/")))
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._progress(0.3)
        prepared = self._update.prepared
        assert prepared is not None
        self._plan_training(batch, prepared, prepared.weights_R, self._algorithm.epochs)
        # Fused kernels have it anyway. Without them it would cost a buffer of tokens x vocabulary here.
        fused = self.config.actor_rollout_ref.model.use_fused_kernels
        batch.extra_info["calculate_entropy"] = fused or self._algorithm.needs_entropy
        measured = self.actor_rollout_wg.update_actor(batch)["metrics"]
        if self._once:
            self._update.old_R = rows.join(self._update.samples, measured.pop(OLD_LOGPROBS))
        else:
            self._update.old_R = self._gather(batch, "old_log_probs")
        metrics.update(reduce_metrics(rename_dict(measured, "actor/")))
        return batch

    # Parts of the above.

    def _usable(self, batch: Batch) -> TrainableBatch:
        """The part of a batch that servers and training workers can take."""
        fits = self.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu * self._sequence_parallel
        context = min(self.context_length, fits)
        return filter_trainable(batch, context_length=context, vocabulary=len(self.tokenizer), grammars=False)

    def _expect(self) -> None:
        """Say whose weights and version come next."""
        ray.get([server.expect.remote(self._policy.name) for server in self.servers.server_handles])

    def _plan_training(self, batch: KVBatchMeta, prepared: PreparedBatch, weights_R: Tensor, epochs: int) -> None:
        """Tell the workers about optimizer steps; `weights_R`: the algorithm's token weights."""
        update = self._update
        total = float(prepared.step_weights(weights_R, update.steps).sum())
        size = len(batch) // len(update.steps)
        batch.extra_info.update(
            global_batch_size=size,
            mini_batch_size=size,
            epochs=epochs,
            seed=self._seed,
            dataloader_kwargs={"shuffle": False},
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            **{TRAINING_STEP: update.usable.batch.step},
            **{STEP_WEIGHT: total / len(update.steps) or 1.0},  # Nothing may have a weight.
        )

    def _can_join_calls(self) -> bool:
        """True if calls that continue each other may be one row, because that changes nothing."""
        model = self.config.actor_rollout_ref.model
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        # Experts with a capacity (an override of Megatron's) serve the first tokens of a row, whatever comes after.
        bounded = "capacity_factor" in str(self.config.actor_rollout_ref.actor)
        return not bounded and rows.sees_its_own_past_alone(config)

    def _gather(self, batch: KVBatchMeta, field: str) -> Tensor:
        """[R] a field that veRL computed."""
        fields = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[field])
        update = self._update
        return rows.gather(update.usable.batch, fields[field].unbind(), update.of_rows(batch.keys))


@register_trainer(SHARED)
class SharedTrainer(AglTrainer, PPOTrainerColocateAsync):  # type: ignore[misc]
    """Training and serving share the GPUs: meanwhile the servers sleep, and answer afterwards (`agl_verl.pause`)."""

    def on_sample_end(self) -> None:
        """From here to `on_step_end` nothing is served."""
        self.checkpoint_manager.abort_replicas()
        self.checkpoint_manager.sleep_replicas()


@register_trainer(SEPARATE)
class SeparateTrainer(AglTrainer, PPOTrainerSeparateAsync):  # type: ignore[misc]
    """Servers have GPUs of their own, and answer with the weights that they have while others are trained.

    Nothing enters while these are brought to them; what was begun before is sampled anew (`agl_verl.pause`).
    """

    prev_step_profile = False  # veRL's own loop sets it; profiles are not taken here.

    @property
    def servers(self) -> LLMServerManager:
        """Servers on GPUs of their own."""
        return self.standalone_server_manager

    def on_sample_end(self) -> None:
        """Serving goes on."""

    def _setup(self) -> None:
        # veRL 0.9.1 ends this with a line for its log that logging refuses.
        logging.getLogger(PPOTrainerSeparateAsync.__module__).setLevel(logging.WARNING)
        super()._setup()
