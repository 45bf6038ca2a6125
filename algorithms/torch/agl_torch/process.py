"""The engine process: `python -m agl_torch.process`, started by `agl_torch.engine.TorchEngine`."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import uvicorn
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from agl_core.engines.child import Host
from agl_core.engines.updates import UpdateRequest
from agl_core.memory import peak_rss_bytes
from agl_core.protocols import Progress, UpdateResult
from agl_core.types import Batch, Needs, RecordedReply, TokenizedReply, Workload
from agl_torch.api import create_app
from agl_torch.chat.text import tokenized
from agl_torch.loop import EngineLoop
from agl_torch.model_server import ModelServer
from agl_torch.plugin import TorchOptions
from agl_torch.policies import Policies, Versions

_log = logging.getLogger(__name__)


def main() -> None:
    """Load, announce, serve."""
    host = Host.connect(TorchOptions)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with host.starting():
        host.stage("loading the weights")
        engine = ServedPolicies(host)
    host.serve(engine)


class ServedPolicies:
    """The policies behind an HTTP server, which has a thread of its own; see `agl_core.engines.child.Served`."""

    def __init__(self, host: Host[TorchOptions]) -> None:
        options, context = host.options, host.context
        self._policies = Policies.load(options, context)
        policies = self._policies.policies
        self._loop = EngineLoop({name: policy.sampler for name, policy in policies.items()}, host.lost)
        served = {name: ModelServer(name, policy.loaded) for name, policy in policies.items()}
        self._served = served
        versions = Versions(options, self._loop, served, threads=self._policies.threads.training)
        self.publish, self.withdraw, self.merge = versions.publish, versions.withdraw, versions.merge
        app = create_app(served, self._loop, api_key=context.api_key)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.urls = (f"http://127.0.0.1:{listener.getsockname()[1]}/v1",)
        self.context_length = self._policies.context_length
        self._loop.start()
        threading.Thread(target=_serve, args=(server, listener, host), name="agl-http", daemon=True).start()
        _log.info("Serving %s at %s.", ", ".join(served) or "nothing yet", *self.urls)

    def update(self, request: UpdateRequest, progress: Progress) -> UpdateResult:
        return self._loop.run_exclusive(lambda: self._policies.update(request, progress)).result()

    def estimate(self, work: Workload) -> Needs:
        return self._loop.run_exclusive(lambda: self._policies.estimate(work)).result()

    def tokenize(self, policy: str, replies: Sequence[RecordedReply]) -> Sequence[TokenizedReply | None]:
        """The token ids of recorded replies by the policy's tokenizer and chat template."""
        text = self._served[policy].text
        return [tokenized(text, reply) for reply in replies]

    def logprobs(self, policy: str, batch: Batch) -> NDArray[np.float64]:
        """Of recorded responses, under the weights as they are."""
        return self._loop.run_exclusive(lambda: self._policies.logprobs(policy, batch)).result()

    def save(self, folder: Path) -> None:
        self._loop.run_exclusive(lambda: self._policies.save(folder)).result()

    def load(self, folder: Path) -> None:
        self._loop.run_exclusive(lambda: self._policies.restore(folder)).result()

    def versions(self) -> Mapping[str, int]:
        return self._policies.versions

    def stats(self) -> Mapping[str, float]:
        """tokens_prefilled, tokens_reused, tokens_decoded, preempted since the start; peak_rss_bytes, cache_bytes, and
        peak_gpu_bytes (what torch took of the GPU) on a GPU."""
        counted = self._loop.counters()
        uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        on_gpu = {"peak_gpu_bytes": float(torch.cuda.max_memory_reserved())} if uses_gpu else {}
        return {
            **{name if name == "preempted" else f"tokens_{name}": float(count) for name, count in counted.items()},
            "peak_rss_bytes": float(peak_rss_bytes()),
            "cache_bytes": float(self._loop.cache_nbytes),
            **on_gpu,
        }


def _serve(server: uvicorn.Server, listener: socket.socket, host: Host[TorchOptions]) -> None:
    """Until the process ends; without its server the engine is of no use."""
    try:
        asyncio.run(server.serve(sockets=[listener]))
    finally:
        host.lost("The engine's HTTP server ended.")


if __name__ == "__main__":
    main()
