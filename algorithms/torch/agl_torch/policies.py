"""The policies of an engine process: weights, trainer and sampler of each, and versions that are served alone."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from agl_algorithms.interface import Algorithm
from agl_core.config.policies import OptimizerSection
from agl_core.engines.child import find_algorithm
from agl_core.engines.updates import UpdateRequest
from agl_core.errors import EngineError, nearest
from agl_core.plugins import Plugins
from agl_core.protocols import EngineContext, PolicySpec, Progress, UpdateResult
from agl_core.types import Batch, Needs, Workload
from agl_torch.loop import EngineLoop
from agl_torch.model_server import ModelServer
from agl_torch.models.loading import Bases, LoadedModel, load_model, merge
from agl_torch.models.memory import CACHE, PROCESS, device_memory, memory_bytes, seconds, tokens_per_pass
from agl_torch.plugin import TorchOptions
from agl_torch.sampling import Sampler
from agl_torch.training.trainer import PolicyTrainer, load_policy, save_policy


@dataclass(frozen=True)
class Policy:
    """One set of weights that samples and trains."""

    loaded: LoadedModel
    trainer: PolicyTrainer
    sampler: Sampler


class Threads(NamedTuple):
    """How many threads torch uses. What is computed for one token of a tiny model is not worth sharing out."""

    sampling: int
    training: int


TINY = 10_000_000
"""Weights of a model that samples on one thread."""


class Policies:
    """All policies of the process. Every method runs on the tensor thread, while nothing is being sampled."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        plugins: Plugins,
        threads: Threads,
        trained_by: Mapping[str, tuple[str, Mapping[str, Any]]],
    ) -> None:
        self.policies = dict(policies)
        self._plugins = plugins
        self._trained_by = dict(trained_by)
        """Each policy's algorithm and its options, as its updates will name them."""
        self.threads = threads
        torch.set_num_threads(threads.sampling)

    @classmethod
    def load(cls, options: TorchOptions, context: EngineContext) -> Policies:
        """Load every policy; each has its own share of the cache and its own seed, adapters share their bases."""
        device = choose_device(options.device)
        threads = options.threads or torch.get_num_threads()
        if context.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(context.seed)
        share = int(cache_bytes(options, device) / max(1, len(context.policies)))
        bases = Bases()
        made = {
            name: _make_policy(spec, options, context, device, context.seed + place, share, bases)
            for place, (name, spec) in enumerate(context.policies.items())
        }
        largest = max((policy.loaded.size for policy in made.values()), default=0)
        sampling = 1 if options.threads is None and largest < TINY else threads
        trained_by = {name: (spec.algorithm, spec.algorithm_options) for name, spec in context.policies.items()}
        return cls(made, Plugins.load(context.plugin_files), Threads(sampling, training=threads), trained_by)

    @property
    def context_length(self) -> int:
        return min((policy.loaded.context_length for policy in self.policies.values()), default=0)

    @property
    def versions(self) -> dict[str, int]:
        return {name: policy.sampler.version for name, policy in self.policies.items()}

    def update(self, request: UpdateRequest, progress: Progress) -> UpdateResult:
        policy = self._policy(request.policy)
        component, options = find_algorithm(self._plugins, request.algorithm, request.options)
        algorithm: Algorithm = component.build(options)
        steps = policy.trainer.optimizer.steps
        policy.sampler.release()
        torch.set_num_threads(self.threads.training)
        try:
            return policy.trainer.update(request.batch, algorithm, progress)
        except Exception:
            if policy.trainer.optimizer.steps != steps:
                policy.trainer.version += 1  # The weights did change: what is sampled from now on is another version.
            raise
        finally:
            torch.set_num_threads(self.threads.sampling)
            policy.sampler.new_version(policy.trainer.version)

    def logprobs(self, policy: str, batch: Batch) -> NDArray[np.float64]:
        """[R] of a batch's response tokens, under the weights as they are."""
        chosen = self._policy(policy)
        torch.set_num_threads(self.threads.training)
        try:
            return chosen.trainer.logprobs(batch)
        finally:
            torch.set_num_threads(self.threads.sampling)

    def _policy(self, name: str) -> Policy:
        if name not in self.policies:
            raise EngineError(f"There is no policy '{name}'. {nearest(name, self.policies)}")
        return self.policies[name]

    def estimate(self, work: Workload) -> Needs:
        memory, taken = PROCESS, 0.0
        for name, policy in self.policies.items():
            component, options = find_algorithm(self._plugins, *self._trained_by[name])
            algorithm: Algorithm = component.build(options)
            memory += memory_bytes(
                policy.loaded,
                algorithm,
                tokens_per_pass=policy.trainer.tokens_per_pass,
                cache=policy.sampler.cache_bytes(work.prompt_tokens + work.response_tokens),
            )
            taken += seconds(policy.loaded, algorithm, work)
        return Needs(memory_bytes=memory, available_bytes=device_memory(policy.loaded.device), seconds=taken)

    def save(self, folder: Path) -> None:
        for name, policy in self.policies.items():
            save_policy(folder / name, policy.loaded, policy.trainer)

    def restore(self, folder: Path) -> None:
        for name, policy in self.policies.items():
            load_policy(folder / name, policy.loaded, policy.trainer)
            policy.sampler.new_version(policy.trainer.version)


def cache_bytes(options: TorchOptions, device: torch.device) -> float:
    """What all policies together may have for keys and values."""
    return CACHE * device_memory(device) if options.cache_mib is None else options.cache_mib * 2**20


def choose_device(wanted: str) -> torch.device:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise EngineError(
            "engine.torch.device is 'cuda', and torch finds no CUDA GPU. Use device = 'cpu' or 'auto', or install a "
            "torch build for your GPU."
        )
    return torch.device("cuda", 0) if available and wanted != "cpu" else torch.device("cpu")


def _make_policy(
    spec: PolicySpec,
    options: TorchOptions,
    context: EngineContext,
    device: torch.device,
    seed: int,
    share: int,
    bases: Bases,
) -> Policy:
    loaded = load_for_sampling(spec, options, device, seed, bases)
    trainer = PolicyTrainer(
        loaded,
        OptimizerSection.model_validate(dict(spec.optimizer)),
        steps=context.steps,
        tokens_per_micro_batch=options.tokens_per_micro_batch or tokens_per_pass(loaded.model, device),
        gradient_checkpointing=options.gradient_checkpointing,
        seed=seed,
        initial=lambda: load_model(spec, device, seed, bases),
    )
    return Policy(loaded, trainer, make_sampler(loaded, options, share, deterministic=context.deterministic))


def load_for_sampling(
    spec: PolicySpec, options: TorchOptions, device: torch.device, seed: int, bases: Bases
) -> LoadedModel:
    """A policy's model, with the context that the settings allow."""
    loaded = load_model(spec, device, seed, bases)
    if options.max_context is None:
        return loaded
    return replace(loaded, context_length=min(loaded.context_length, options.max_context))


def make_sampler(loaded: LoadedModel, options: TorchOptions, share: int, *, deterministic: bool) -> Sampler:
    """`share` is how many bytes of keys and values it may hold. EngineError with the remedy if that is too little."""
    try:
        return Sampler(loaded, cache_bytes=share, max_rows=options.max_rows, deterministic=deterministic)
    except EngineError as error:
        raise EngineError(f"{error} Raise engine.torch.cache_mib, or lower engine.torch.max_context.") from error


_log = logging.getLogger(__name__)
_SHARES = 4
"""Parts of the memory for keys and values, of which each served version gets one: how many there will be is unknown."""


class Versions:
    """Serves saved policies on `loop`, by the names in `served`; adapters of the same weights share them.

    `threads` is how many CPU threads sampling from a large model uses. Used from one thread, which is not the one that
    samples: what is loaded keeps nothing from being answered.
    """

    def __init__(self, options: TorchOptions, loop: EngineLoop, served: dict[str, ModelServer], threads: int) -> None:
        self._options, self._loop, self._served, self._most = options, loop, served, threads
        self._bases = Bases()
        self._names: set[str] = set()
        self._threads = 0

    def publish(self, name: str, spec: PolicySpec) -> None:
        """Load a policy and serve it; EngineError if there is one of this name."""
        if name in self._served:
            raise EngineError(f"A policy '{name}' is served already.")
        device = choose_device(self._options.device)
        loaded = load_for_sampling(spec, self._options, device, seed=0, bases=self._bases)
        share = int(cache_bytes(self._options, device) / _SHARES)
        sampler = make_sampler(loaded, self._options, share, deterministic=False)
        sampler.version = spec.version
        self._use_threads(loaded.size)
        self._loop.add(name, sampler)
        self._served[name] = ModelServer(name, loaded)
        self._names.add(name)
        _log.info("Serving %s.", name)

    def withdraw(self, name: str) -> None:
        """Serve a policy no longer; what it is answering is answered."""
        if name not in self._names:
            raise EngineError(f"No published policy is called '{name}'. {nearest(name, self._names)}")
        self._names.remove(name)
        del self._served[name]
        self._loop.remove(name)
        gc.collect()  # peft's modules refer to each other.
        _log.info("Serving %s no longer.", name)

    def merge(self, spec: PolicySpec, folder: Path) -> None:
        """Write a model with its adapter merged into it; the model is loaded anew, because merging changes it."""
        loaded = load_for_sampling(spec, self._options, choose_device("cpu"), seed=0, bases=Bases())
        if not loaded.has_adapter:
            raise EngineError(f"There is no adapter to merge into '{spec.name or spec.model}'.")
        merge(loaded.model, loaded.tokenizer, folder)

    def _use_threads(self, size: int) -> None:
        """Have the sampling thread use what suits the largest model: a tiny one is faster on a single thread."""
        wanted = self._options.threads or (1 if size < TINY else self._most)
        if wanted > self._threads:
            self._threads = wanted
            self._loop.run_exclusive(lambda: torch.set_num_threads(wanted)).result()
