"""Policies that are served without being trained: versions that were saved, which come and go."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import torch

from agl_core.errors import EngineError, nearest
from agl_core.protocols import PolicySpec
from agl_torch.models.adapters import merge
from agl_torch.models.loading import Bases
from agl_torch.options import TorchOptions
from agl_torch.policies import TINY, cache_bytes, choose_device, load_for_sampling, make_sampler
from agl_torch.serve import EngineLoop, ModelServer

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
