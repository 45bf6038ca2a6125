"""What the engine process does (`agl_torch.__main__` starts it).

`Policies` has the weights, trainer and sampler of each policy; `ServedPolicies` is what the run may ask of them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
import uvicorn
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from agl_algorithms.fingerprints import write_fingerprint
from agl_algorithms.policy_gradient import Algorithm
from agl_chat.api import ModelServer, create_app
from agl_chat.conversation import ChatText, keep_tokenizer_settings, tokenized
from agl_core.config.sections import OptimizerSection
from agl_core.errors import CheckpointError, EngineError, nearest
from agl_core.plugins import Plugins
from agl_core.protocols import EngineContext, PolicySpec, Progress, ResponseScores, UpdateResult
from agl_core.server.listening import bind
from agl_core.training.child import Host, build_algorithm
from agl_core.types import Batch, Call
from agl_torch.batching import CACHE, device_memory, tokens_per_pass
from agl_torch.loading import Bases, LoadedModel, check_base, fingerprint, first_line, load_model
from agl_torch.loop import EngineLoop
from agl_torch.plugin import TorchOptions
from agl_torch.sampler import Sampler
from agl_torch.teachers import ServedTeacher, load_teacher
from agl_torch.trainer import PolicyTrainer

TINY = 10_000_000
"""Weights of a model that samples on one thread: what is computed for one of its tokens is not worth sharing out."""
_SHARES = 4
"""Parts of the memory for keys and values, of which each published version gets one: how many will come is unknown."""
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def main() -> None:
    """Load, announce, serve."""
    host = Host.connect(TorchOptions)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with host.starting():
        host.stage("loading the weights")
        engine = ServedPolicies(host)
    host.serve(engine)


@dataclass(frozen=True)
class Policy:
    """One set of weights that samples and trains."""

    loaded: LoadedModel
    trainer: PolicyTrainer
    sampler: Sampler
    algorithm: Algorithm | None
    """None of a policy that is only served."""
    teacher: LoadedModel | ServedTeacher | None
    """The teacher that the algorithm wants."""


class Policies:
    """All policies of the process. Every method runs on the tensor thread, while nothing is being sampled.

    Each has its own share of the cache and its own seed; adapters share their bases.
    """

    def __init__(self, options: TorchOptions, context: EngineContext) -> None:
        if context.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(context.seed)
        share, bases = 1 / max(1, len(context.policies)), Bases()
        self.bases, plugins = bases, Plugins.load(context.plugin_files)
        self.policies: dict[str, Policy] = {}
        for seed, (name, spec) in enumerate(context.policies.items(), context.seed):
            loaded = _load(spec, options, choose_device(options.device), seed, bases)
            sampler = _make_sampler(loaded, options, share, deterministic=context.deterministic)
            trainer = _make_trainer(loaded, spec, options, context.steps, seed, bases)
            algorithm = build_algorithm(plugins, spec.algorithm, spec.algorithm_options) if spec.algorithm else None
            teacher = None
            if algorithm is not None and algorithm.needs_scores and algorithm.teacher is not None:
                teacher = load_teacher(algorithm.teacher, spec, loaded, bases)
            self.policies[name] = Policy(loaded, trainer, sampler, algorithm, teacher)
        self.threads = options.threads or torch.get_num_threads()
        """Of training."""
        largest = max((policy.loaded.size for policy in self.policies.values()), default=0)
        self._sampling_threads = 1 if options.threads is None and largest < TINY else self.threads
        torch.set_num_threads(self._sampling_threads)

    @property
    def context_length(self) -> int:
        return min((policy.loaded.context_length for policy in self.policies.values()), default=0)

    @property
    def versions(self) -> dict[str, int]:
        return {name: policy.sampler.version for name, policy in self.policies.items()}

    def update(self, policy: str, batch: Batch, progress: Progress) -> UpdateResult:
        trained = self._policy(policy)
        if trained.algorithm is None:
            raise EngineError(f"No algorithm trains the policy '{policy}': it is only served.")
        steps = trained.trainer.optimizer.steps
        trained.sampler.release()
        try:
            with self._all_threads():
                return trained.trainer.update(batch, trained.algorithm, progress, trained.teacher)
        except Exception:
            if trained.trainer.optimizer.steps != steps:
                trained.trainer.version += 1  # The weights did change: what is sampled from now on is another version.
            raise
        finally:
            trained.sampler.new_version(trained.trainer.version)

    def logprobs(self, policy: str, batch: Batch) -> ResponseScores:
        """Of a batch's response tokens, under the weights as they are."""
        with self._all_threads():
            return self._policy(policy).trainer.logprobs(batch)

    def save(self, folder: Path) -> None:
        for name, policy in self.policies.items():
            save_policy(folder / name, policy.loaded, policy.trainer)

    def load(self, folder: Path) -> None:
        for name, policy in self.policies.items():
            load_policy(folder / name, policy.loaded, policy.trainer)
            policy.sampler.new_version(policy.trainer.version)

    def _policy(self, name: str) -> Policy:
        if name not in self.policies:
            raise EngineError(f"There is no policy '{name}'. {nearest(name, self.policies)}")
        return self.policies[name]

    @contextmanager
    def _all_threads(self) -> Iterator[None]:
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(self._sampling_threads)


def save_policy(folder: Path, loaded: LoadedModel, trainer: PolicyTrainer) -> None:
    """Write a policy to a new folder: its weights as transformers and peft load them, and its trainer."""
    try:
        # The embeddings are the base's: to find that out, peft would look for the base, on the hub too.
        of_adapter = {"save_embedding_layers": False} if loaded.has_adapter else {}
        loaded.model.save_pretrained(folder / "model", safe_serialization=True, **of_adapter)
        loaded.tokenizer.save_pretrained(folder / "model")
        keep_tokenizer_settings(loaded.tokenizer.name_or_path, folder / "model")
        if loaded.has_adapter:
            write_fingerprint(folder / "model", fingerprint(loaded.model))
        torch.save(trainer.state_dict(), folder / "trainer.pt")
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"The checkpoint {folder} cannot be written: {error}. Make room or choose a folder that you may write to."
        ) from error


def load_policy(folder: Path, loaded: LoadedModel, trainer: PolicyTrainer) -> None:
    """Restore what `save_policy` wrote, into the same model object."""
    try:
        state = torch.load(folder / "trainer.pt", map_location=loaded.device, weights_only=True)
        if loaded.has_adapter:
            check_base(folder / "model", loaded.model, "the run's model")
        _load_weights(folder / "model", loaded)
        trainer.load_state_dict(state)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError, SafetensorError) as error:
        raise CheckpointError(
            f"The checkpoint {folder} cannot be restored: {first_line(error)} Resume with the model, dtype and lora "
            f"settings that it was saved with; if it is damaged, from an earlier one."
        ) from error


def _load_weights(folder: Path, loaded: LoadedModel) -> None:
    if loaded.has_adapter:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        weights = load_file(folder / "adapter_model.safetensors", device=str(loaded.device))
        result: Any = set_peft_model_state_dict(loaded.model, weights)
        if result.unexpected_keys:
            raise ValueError(f"unknown adapter weights, such as {result.unexpected_keys[0]}.")
        return
    saved = type(loaded.model).from_pretrained(folder, dtype=loaded.dtype)
    loaded.model.load_state_dict(saved.state_dict())


def choose_device(wanted: str) -> torch.device:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise EngineError(
            "engine.torch.device is 'cuda', and torch finds no CUDA GPU. Use device = 'cpu' or 'auto', or install a "
            "torch build for your GPU."
        )
    return torch.device("cuda", 0) if available and wanted != "cpu" else torch.device("cpu")


def _load(spec: PolicySpec, options: TorchOptions, device: torch.device, seed: int, bases: Bases) -> LoadedModel:
    """A policy's model, with the context that the settings allow."""
    loaded = load_model(spec, device, seed, bases)
    return replace(loaded, context_length=min(loaded.context_length, options.max_context or loaded.context_length))


def _chat_of(name: str, loaded: LoadedModel) -> ModelServer:
    return ModelServer(name, ChatText(loaded.tokenizer, loaded.eos_ids), loaded.context_length)


def _make_trainer(
    loaded: LoadedModel, spec: PolicySpec, options: TorchOptions, steps: int, seed: int, bases: Bases
) -> PolicyTrainer:
    return PolicyTrainer(
        loaded,
        OptimizerSection.model_validate(dict(spec.optimizer)),
        steps=steps,
        tokens_per_micro_batch=options.tokens_per_micro_batch or tokens_per_pass(loaded.model, loaded.device),
        gradient_checkpointing=options.gradient_checkpointing,
        seed=seed,
        initial=lambda: load_model(spec, loaded.device, seed, bases),
    )


def _make_sampler(loaded: LoadedModel, options: TorchOptions, share: float, *, deterministic: bool) -> Sampler:
    """`share`: which part of the memory for keys and values it may hold. EngineError if that is too little."""
    whole = CACHE * device_memory(loaded.device) if options.cache_mib is None else options.cache_mib * 2**20
    try:
        return Sampler(loaded, cache_bytes=int(share * whole), max_rows=options.max_rows, deterministic=deterministic)
    except EngineError as error:
        raise EngineError(f"{error} Raise engine.torch.cache_mib, or lower engine.torch.max_context.") from error


def _alone(method: Callable[..., Result]) -> Callable[..., Result]:
    """A method of `Policies`, for `ServedPolicies`: it runs on the tensor thread while nothing is sampled."""

    def run(self: ServedPolicies, *arguments: Any) -> Result:
        return self._loop.run_exclusive(lambda: method(self._policies, *arguments)).result()

    return run


class ServedPolicies:
    """The policies behind an HTTP server, which has a thread of its own; see `agl_core.training.child.Host.serve`.

    Used from one thread, which is not the one that samples: what is loaded keeps nothing from being answered.
    """

    def __init__(self, host: Host[TorchOptions]) -> None:
        self._options, context = host.options, host.context
        self._policies = Policies(self._options, context)
        policies = self._policies.policies
        self._loop = EngineLoop({name: policy.sampler for name, policy in policies.items()}, host.lost)
        self._served = {name: _chat_of(name, policy.loaded) for name, policy in policies.items()}
        self._published: set[str] = set()
        app = create_app(self._served, self._loop, api_key=context.api_key)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        listener = bind("127.0.0.1", 0)
        self.urls = (f"http://127.0.0.1:{listener.getsockname()[1]}/v1",)
        self.context_length = self._policies.context_length
        self._loop.start()
        threading.Thread(target=_serve, args=(server, listener, host), name="agl-http", daemon=True).start()
        _log.info("Serving %s at %s.", ", ".join(self._served) or "nothing yet", *self.urls)

    update, save, load = _alone(Policies.update), _alone(Policies.save), _alone(Policies.load)
    logprobs = _alone(Policies.logprobs)

    def tokenize(self, policy: str, calls: Sequence[Call]) -> Sequence[Call]:
        """Recorded calls with token ids by the policy's tokenizer and chat template."""
        return [tokenized(self._served[policy].text, call) for call in calls]

    def versions(self) -> Mapping[str, int]:
        return self._policies.versions

    def stats(self) -> Mapping[str, float]:
        """tokens_prefilled, tokens_reused, tokens_decoded, preempted since the start; cache_bytes, and peak_gpu_bytes
        (what torch took of the GPU) on a GPU."""
        uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        on_gpu = {"peak_gpu_bytes": torch.cuda.max_memory_reserved()} if uses_gpu else {}
        return {**self._loop.counters(), "cache_bytes": self._loop.cache_nbytes, **on_gpu}

    def publish(self, name: str, spec: PolicySpec) -> None:
        """Load a saved policy and serve it; EngineError if there is one of this name."""
        if name in self._served:
            raise EngineError(f"A policy '{name}' is served already.")
        loaded = _load(spec, self._options, choose_device(self._options.device), seed=0, bases=self._policies.bases)
        sampler = _make_sampler(loaded, self._options, 1 / _SHARES, deterministic=False)
        sampler.version = spec.version
        if self._options.threads is None and loaded.size >= TINY:
            self._loop.run_exclusive(lambda: torch.set_num_threads(self._policies.threads)).result()
        self._loop.add(name, sampler)
        self._served[name] = _chat_of(name, loaded)
        self._published.add(name)
        _log.info("Serving %s.", name)

    def withdraw(self, name: str) -> None:
        """Serve a published policy no longer; what it is answering is answered."""
        if name not in self._published:
            raise EngineError(f"No published policy is called '{name}'. {nearest(name, self._published)}")
        self._published.remove(name)
        del self._served[name]
        self._loop.remove(name)
        gc.collect()  # peft's modules refer to each other.
        _log.info("Serving %s no longer.", name)


def _serve(server: uvicorn.Server, listener: socket.socket, host: Host[TorchOptions]) -> None:
    """Until the process ends; without its server the engine is of no use."""
    try:
        asyncio.run(server.serve(sockets=[listener]))
    finally:
        host.lost("The engine's HTTP server ended.")
