"""The engine's process, started by `agl_tinker.plugin.TinkerEngine`: the chat API, and the policies' adapters."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvicorn
from transformers import AutoConfig

from agl_algorithms.policy_gradient import Algorithm
from agl_chat.api import ModelServer, create_app
from agl_chat.conversation import ChatText, load_text, tokenized
from agl_core.errors import CheckpointError, EngineError, nearest
from agl_core.plugins import Plugins
from agl_core.protocols import Progress, ResponseScores, UpdateResult
from agl_core.types import Batch, Call
from agl_server.engines.child import Host, build_algorithm
from agl_server.http.listening import bind
from agl_tinker.plugin import TinkerOptions
from agl_tinker.sampling import Samplers, Served
from agl_tinker.service import Division, Service
from agl_tinker.trainer import PolicyTrainer

STATE = "tinker.json"
"""A policy's file in a checkpoint: where the service keeps it, and how far it was."""


def main() -> None:
    host = Host.connect(TinkerOptions)
    with host.starting():
        engine = TinkerServer(host)
    host.serve(engine)


class TinkerServer:
    """The policies behind an HTTP server, which has a thread of its own; see `agl_server.engines.child.Host.serve`."""

    def __init__(self, host: Host[TinkerOptions]) -> None:
        options, context = host.options, host.context
        host.stage("asking the service")
        self._service = Service(options)
        plugins = Plugins.load(context.plugin_files)
        self._samplers = Samplers(self._service, host.lost)
        self._trainers: dict[str, PolicyTrainer] = {}
        self._algorithms: dict[str, Algorithm] = {}
        self._texts: dict[str, ChatText] = {}
        chats, lengths, division = dict[str, ModelServer](), list[int](), None
        for seed, (name, spec) in enumerate(context.policies.items(), context.seed):
            host.stage(f"an adapter for '{name}'")
            config = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
            length = int(config.get_text_config().max_position_embeddings)
            length = min(length, options.max_context or length)
            text = load_text(spec.model, trust_remote_code=spec.trust_remote_code)
            self._texts[name], chats[name] = text, ModelServer(name, text, length)
            lengths.append(length)
            base = self._service.client.create_sampling_client(base_model=self._service.base_of(spec))
            if not spec.algorithm:
                self._samplers.served[name] = Served(spec.version, base, frozenset(text.eos_ids))
                continue
            client = self._service.trains(spec, seed)
            if division is None:
                host.stage("finding out how the service divides gradients")
                with self._service.explained("making steps that are taken back"):
                    division = Division.probed(client, list(range(8, 16)), options.timeout)
                logging.getLogger(__name__).info("The service's division: %s.", division)
            self._algorithms[name] = build_algorithm(plugins, spec.algorithm, spec.algorithm_options)
            if self._algorithms[name].needs_entropy:
                raise EngineError("A Tinker service tells no entropies: set [algorithm] entropy = 0.")
            self._trainers[name] = PolicyTrainer(
                self._service,
                client,
                spec.optimizer,
                division,
                reference=base,
                context_length=length,
                vocabulary=config.get_text_config().vocab_size,
                seed=seed,
                steps=context.steps,
            )
            self._serve_version(name)
        self.context_length = min(lengths)
        app = create_app(chats, self._samplers, api_key=context.api_key)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        listener = bind("127.0.0.1", 0)
        self.urls = (f"http://127.0.0.1:{listener.getsockname()[1]}/v1",)

        def serve() -> None:
            try:
                asyncio.run(server.serve(sockets=[listener]))
            finally:
                host.lost("The engine's HTTP server ended.")

        threading.Thread(target=serve, name="agl-http", daemon=True).start()

    def update(self, policy: str, batch: Batch, progress: Progress) -> UpdateResult:
        trainer = self._trainer(policy)
        result = trainer.update(batch, self._algorithms[policy], progress)
        self._serve_version(policy)
        return result

    def logprobs(self, policy: str, batch: Batch) -> ResponseScores:
        return self._trainer(policy).logprobs(batch)

    def tokenize(self, policy: str, calls: Sequence[Call]) -> Sequence[Call]:
        return [tokenized(self._texts[policy], call) for call in calls]

    def save(self, folder: Path) -> None:
        for name, trainer in self._trainers.items():
            state = trainer.state(_unique(name, trainer.version))
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / STATE).write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        for name, trainer in self._trainers.items():
            try:
                state = json.loads((folder / name / STATE).read_text())
            except (OSError, ValueError) as error:
                raise CheckpointError(f"The checkpoint {folder} cannot be restored: {error}.") from error
            trainer.restore(state)
            self._serve_version(name)

    def versions(self) -> Mapping[str, int]:
        return {name: served.version for name, served in self._samplers.served.items()}

    def stats(self) -> Mapping[str, float]:
        trained = sum(trainer.tokens_trained for trainer in self._trainers.values())
        scored = sum(trainer.tokens_scored for trainer in self._trainers.values())
        return {"tokens_reused": 0.0, **self._samplers.counters, "tokens_trained": trained, "tokens_scored": scored}

    def _serve_version(self, name: str) -> None:
        trainer = self._trainers[name]
        with self._service.explained("saving weights for the sampler"):
            saving = trainer.client.save_weights_and_get_sampling_client_submit()
            sampler = saving.result(self._service.options.timeout)
        self._samplers.served[name] = Served(trainer.version, sampler, frozenset(self._texts[name].eos_ids))

    def _trainer(self, name: str) -> PolicyTrainer:
        if name not in self._trainers:
            raise EngineError(f"There is no policy '{name}' that is trained. {nearest(name, self._trainers)}")
        return self._trainers[name]


def _unique(policy: str, version: int) -> str:
    """A name at the service; a version that is trained again after a resume has other weights."""
    return f"agl-{policy}-{version}-{uuid.uuid4().hex[:8]}"


if __name__ == "__main__":
    main()
