"""The engine process, which `agl_torch.__main__` starts.

`Policies` has the weights, trainer and sampler of each policy, `EngineLoop` is the thread that does all tensor work,
and `TorchServer` is what the run may ask of them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from agl_algorithms.fingerprints import write_fingerprint
from agl_algorithms.policy_gradient import Algorithm
from agl_chat.api import ModelServer, create_app, serve_in_thread
from agl_chat.backends import Generation, Request
from agl_chat.conversation import ChatText, keep_tokenizer_settings, tokenized
from agl_core.errors import CheckpointError, EngineError, nearest
from agl_core.plugins import Plugins
from agl_core.protocols import EngineContext, PolicySpec, Progress, ResponseScores, UpdateResult
from agl_core.types import Batch, Call
from agl_server.engines.child import Host, build_algorithm
from agl_torch.batching import CACHE, device_memory, tokens_per_pass
from agl_torch.loading import Bases, LoadedModel, check_base, fingerprint, first_line, load_model
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
Work: TypeAlias = tuple[Sampler, Request] | Callable[[], Any]
"""A request and its sampler, or a job to run while nothing is being sampled."""


def main() -> None:
    host = Host.connect(TorchOptions)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with host.starting():
        host.stage("loading the weights")
        engine = TorchServer(host)
    host.serve(engine)


@dataclass(frozen=True)
class Policy:
    """One set of weights that samples and trains."""

    loaded: LoadedModel
    trainer: PolicyTrainer
    sampler: Sampler
    algorithm: Algorithm | None
    """None if the policy is only served."""
    teacher: LoadedModel | ServedTeacher | None


class Policies:
    """The policies of the context, each with its own seed and share of the cache; adapters share their bases.

    `update`, `logprobs`, `save` and `load` run on the tensor thread, while nothing is being sampled.
    """

    def __init__(self, options: TorchOptions, context: EngineContext) -> None:
        if context.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(context.seed)
        self._options, self._device, self._bases = options, choose_device(options.device), Bases()
        self._deterministic, self._steps = context.deterministic, context.steps
        plugins, share = Plugins.load(context.plugin_files), 1 / max(1, len(context.policies))
        self.policies: dict[str, Policy] = {}
        for seed, (name, spec) in enumerate(context.policies.items(), context.seed):
            loaded, sampler = self.load_served(spec, share, seed)
            trainer = self._trainer(loaded, spec, seed)
            algorithm = build_algorithm(plugins, spec.algorithm, spec.algorithm_options) if spec.algorithm else None
            teacher = None
            if algorithm is not None and algorithm.needs_scores and algorithm.teacher is not None:
                teacher = load_teacher(algorithm.teacher, spec, loaded, self._bases)
            self.policies[name] = Policy(loaded, trainer, sampler, algorithm, teacher)
        self._threads = options.threads or torch.get_num_threads()
        is_tiny = all(policy.loaded.size < TINY for policy in self.policies.values())
        self._sampling_threads = 1 if options.threads is None and is_tiny else self._threads
        torch.set_num_threads(self._sampling_threads)

    @property
    def versions(self) -> dict[str, int]:
        return {name: policy.sampler.version for name, policy in self.policies.items()}

    def load_served(self, spec: PolicySpec, share: float, seed: int = 0) -> tuple[LoadedModel, Sampler]:
        """A policy's model and sampler, within the context and the `share` of the cache that the settings allow.

        EngineError if it cannot be loaded, or the cache holds no reply.
        """
        options, loaded = self._options, load_model(spec, self._device, seed, self._bases)
        loaded = replace(
            loaded, context_length=min(loaded.context_length, options.max_context or loaded.context_length)
        )
        cache = CACHE * device_memory(self._device) if options.cache_mib is None else options.cache_mib * 2**20
        try:
            return loaded, Sampler(
                loaded,
                cache_bytes=int(share * cache),
                max_rows=options.max_rows,
                deterministic=self._deterministic,
            )
        except EngineError as error:
            raise EngineError(f"{error} Raise engine.torch.cache_mib, or lower engine.torch.max_context.") from error

    def _trainer(self, loaded: LoadedModel, spec: PolicySpec, seed: int) -> PolicyTrainer:
        options = self._options
        return PolicyTrainer(
            loaded,
            spec.optimizer,
            steps=self._steps,
            tokens_per_micro_batch=options.tokens_per_micro_batch or tokens_per_pass(loaded.model, loaded.device),
            gradient_checkpointing=options.gradient_checkpointing,
            seed=seed,
            initial=lambda: load_model(spec, loaded.device, seed, self._bases),
        )

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

    def sample_on_all_threads(self) -> None:
        self._sampling_threads = self._threads
        torch.set_num_threads(self._threads)

    @contextmanager
    def _all_threads(self) -> Iterator[None]:
        torch.set_num_threads(self._threads)
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


class EngineLoop:
    """Drives the samplers of an engine from one thread.

    Requests that arrived before an exclusive job are answered before it runs; later ones wait until it is over. So a
    job may change weights, and no response sees two versions of them. `samplers`, by model, may change meanwhile: a
    model that goes answers what it was asked before. `lost` gets the reason if an error ends the thread.

        loop = EngineLoop({"default": sampler}, host.lost)
        loop.start()
        generated = await loop.generate(request)
        metrics = await asyncio.wrap_future(loop.run_exclusive(lambda: trainer.update(batch)))
    """

    def __init__(self, samplers: Mapping[str, Sampler], lost: Callable[[str], object]) -> None:
        self._samplers, self._lost = samplers, lost
        self._inbox: deque[tuple[Work, Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._futures: dict[tuple[Sampler, str], Future[Generation]] = {}
        """By sampler and request id."""
        self._thread = threading.Thread(target=self._run, name="agl-torch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def generate(self, request: Request) -> Generation:
        """Answer a request by its model's sampler; its id must be unique among those in flight.

        Cancelling it frees its place at once. Raises ApiError if its grammar cannot be enforced.
        """
        sampler = self._samplers[request.model]
        if request.grammar is not None:  # Compiling may take long, and is none of the tensor thread's work.
            await asyncio.to_thread(sampler.grammars.start, request.grammar, request.prompt_ids)
        generated: Generation = await asyncio.wrap_future(self._post((sampler, request)))
        return generated

    def run_exclusive(self, job: Callable[[], Result]) -> Future[Result]:
        """Run a function on the tensor thread while nothing is being sampled; it runs to its end in any case."""
        return self._post(job)

    def _post(self, work: Work) -> Future[Any]:
        future: Future[Any] = Future()
        with self._wake:
            self._inbox.append((work, future))
            self._wake.notify()
        return future

    # These run on the thread.

    def _run(self) -> None:
        try:
            while True:
                while (message := self._next_message()) is not None:
                    self._do(*message)
                for sampler in self._in_use():
                    self._step(sampler)
        except BaseException as error:
            _log.exception("The thread that samples and trains ended.")
            self._lost(f"The thread that samples and trains ended by {type(error).__name__}: {error}")

    def _in_use(self) -> list[Sampler]:
        """The samplers of all models, and those of models that are gone and still have to answer."""
        samplers = list(self._samplers.values())  # One operation, since another thread may add or remove some.
        return list(dict.fromkeys([*samplers, *(sampler for sampler, _ in self._futures)]))

    def _next_message(self) -> tuple[Work, Future[Any]] | None:
        """The next message; None if sampling has to go on first. Waits while there is nothing to do."""
        with self._wake:
            while True:
                busy = not all(sampler.idle for sampler in self._in_use())
                if self._inbox and (isinstance(self._inbox[0][0], tuple) or not busy):
                    return self._inbox.popleft()
                if busy:
                    return None
                self._wake.wait()

    def _do(self, work: Work, future: Future[Any]) -> None:
        try:
            if isinstance(work, tuple):
                sampler, request = work
                sampler.submit(request)
                self._futures[sampler, request.id] = future
            else:
                _succeed(future, work())
        except Exception as error:
            _fail(future, error)

    def _step(self, sampler: Sampler) -> None:
        for key in [key for key, future in self._futures.items() if key[0] is sampler and future.cancelled()]:
            del self._futures[key]
            sampler.abort(key[1])
        if sampler.idle:
            return
        try:
            finished = sampler.step()
        except Exception as error:
            _log.exception("Sampling failed; the model's requests in flight are given up.")
            sampler.reset()
            for key in [key for key in self._futures if key[0] is sampler]:
                _fail(self._futures.pop(key), EngineError(f"Sampling failed: {type(error).__name__}: {error}"))
            return
        for generated in finished:
            _succeed(self._futures.pop((sampler, generated.request.id)), generated)


def _succeed(future: Future[Any], result: Any) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def _fail(future: Future[Any], error: BaseException) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


class TorchServer:
    """The policies behind an HTTP server, which has a thread of its own; see `agl_server.engines.child.Host.serve`.

    The run uses it from one thread, which is not the one that samples: loading a policy delays no reply.
    """

    def __init__(self, host: Host[TorchOptions]) -> None:
        self._policies = policies = Policies(host.options, host.context)
        self._samplers = {name: policy.sampler for name, policy in policies.policies.items()}
        self._loop = EngineLoop(self._samplers, host.lost)
        self._chats = {name: _chat(name, policy.loaded) for name, policy in policies.policies.items()}
        self.context_length = min((p.loaded.context_length for p in policies.policies.values()), default=0)
        self.update, self.logprobs = self._alone(policies.update), self._alone(policies.logprobs)
        self.save, self.load = self._alone(policies.save), self._alone(policies.load)
        self._loop.start()
        app = create_app(self._chats, self._loop, api_key=host.context.api_key)
        self.urls = (serve_in_thread(app, host.lost),)
        _log.info("Serving %s at %s.", ", ".join(self._chats) or "nothing yet", *self.urls)

    def tokenize(self, policy: str, calls: Sequence[Call]) -> Sequence[Call]:
        """Recorded calls with token ids by the policy's tokenizer and chat template."""
        return [tokenized(self._chats[policy].text, call) for call in calls]

    def versions(self) -> Mapping[str, int]:
        return self._policies.versions

    def stats(self) -> Mapping[str, float]:
        """The samplers' counters since the start, cache_bytes, and on a GPU peak_gpu_bytes, what torch took of it."""
        samplers = list(self._samplers.values())
        counters = Counter[str]()
        for sampler in samplers:
            counters.update(sampler.counters)
        counters["tokens_trained"] = sum(policy.trainer.tokens_trained for policy in self._policies.policies.values())
        uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        on_gpu = {"peak_gpu_bytes": torch.cuda.max_memory_reserved()} if uses_gpu else {}
        return {**counters, "cache_bytes": sum(sampler.cache_nbytes for sampler in samplers), **on_gpu}

    def load_policy(self, name: str, spec: PolicySpec) -> None:
        """Load a saved policy and serve it; EngineError if there is one of this name."""
        if name in self._chats:
            raise EngineError(f"A policy '{name}' is served already.")
        loaded, sampler = self._policies.load_served(spec, 1 / _SHARES)
        sampler.version = spec.version
        if loaded.size >= TINY:
            self._alone(self._policies.sample_on_all_threads)()
        self._samplers[name], self._chats[name] = sampler, _chat(name, loaded)
        _log.info("Serving %s.", name)

    def unload_policy(self, name: str) -> None:
        """Serve a published policy no longer; what it is answering is answered."""
        published = self._chats.keys() - self._policies.policies.keys()
        if name not in published:
            raise EngineError(f"No published policy is called '{name}'. {nearest(name, published)}")
        del self._chats[name], self._samplers[name]
        gc.collect()  # peft's modules refer to each other.
        _log.info("Serving %s no longer.", name)

    def _alone(self, method: Callable[..., Result]) -> Callable[..., Result]:
        """A method that runs on the tensor thread, while nothing is being sampled."""
        return lambda *arguments: self._loop.run_exclusive(lambda: method(*arguments)).result()


def _chat(name: str, loaded: LoadedModel) -> ModelServer:
    return ModelServer(name, ChatText(loaded.tokenizer, loaded.eos_ids), loaded.context_length)
