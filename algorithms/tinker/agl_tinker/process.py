"""The engine's process, started by `agl_tinker.plugin.TinkerEngine`: the chat API, and the policies' adapters."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import AutoConfig

from agl_algorithms.policy_gradient import Algorithm
from agl_chat.api import ModelServer, create_app, serve_in_thread
from agl_chat.conversation import ChatText, keep_tokenizer_settings, load_text, load_tokenizer, tokenized
from agl_core.errors import CheckpointError, EngineError, nearest
from agl_core.plugins import Plugins
from agl_core.protocols import Progress, ResponseScores, UpdateResult
from agl_core.types import Batch, Call
from agl_server.engines.child import Host, build_algorithm
from agl_tinker.plugin import TinkerOptions
from agl_tinker.sampling import Samplers, Served
from agl_tinker.service import Division, Service, unique
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
        self._tell, self._service = host.stage, Service(options, host.stage)
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
            base = self._service.sampler_of(self._service.base_of(spec))
            if not spec.algorithm:
                self._samplers.served[name] = Served(spec.version, base, frozenset(text.eos_ids))
                continue
            algorithm = self._algorithms[name] = build_algorithm(plugins, spec.algorithm, spec.algorithm_options)
            if algorithm.needs_entropy:
                raise EngineError("A Tinker service tells no entropies: set [algorithm] entropy = 0.")
            teacher = algorithm.teacher if algorithm.needs_scores else None
            vocabulary = config.get_text_config().vocab_size
            if division is None:
                host.stage("finding out how the service divides gradients")
                # No model expects these tokens: where one is sure, no step changes a log-probability.
                tokens = random.Random(0).sample(range(min(vocabulary, 1000)), 8)
                probed = self._service.trains(spec, seed)
                with self._service.explained("making steps that are taken back"):
                    division = Division.probed(probed, tokens, options.timeout)
                logging.info("The service's division: %s.", division)
            self._trainers[name] = PolicyTrainer(
                self._service,
                self._service.trains(spec, seed),
                spec,
                division,
                reference=base,
                teacher=None if teacher is None else self._service.sampler_of(teacher.place),
                context_length=length,
                vocabulary=vocabulary,
                seed=seed,
                steps=context.steps,
            )
            self._serve_version(name)
        self.context_length = min(lengths)
        self.urls = (serve_in_thread(create_app(chats, self._samplers, api_key=context.api_key), host.lost),)

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
            state = trainer.state(unique(name, trainer.version))
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / STATE).write_text(json.dumps(state))
            self._export(name, folder / name / "model")

    def _export(self, name: str, folder: Path) -> None:
        """Write the adapter as peft loads it. The checkpoint is whole without: the service has the weights."""
        spec = (trainer := self._trainers[name]).spec
        assert spec.lora is not None, "the run's side checks it"
        try:
            with self._service.explained("saving weights to download them"):
                self._service.download(trainer.client, unique(name, trainer.version), folder)
            file = folder / "adapter_config.json"
            described = json.loads(file.read_text()) | {"base_model_name_or_path": spec.name or spec.model}
            # skyrl-tx names no layers, and peft would take its own for the model.
            described["target_modules"] = described.get("target_modules") or sorted(spec.lora.targets)
            file.write_text(json.dumps(described, indent=2))
            load_tokenizer(spec.model, trust_remote_code=spec.trust_remote_code).save_pretrained(folder)
            keep_tokenizer_settings(spec.model, folder)
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            self._tell(f"{folder} is not written ({error}). `tinker checkpoint download` gets it from the service.")

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
        counted = Counter(tokens_reused=0)
        for counters in (self._samplers.counters, *(trainer.counters for trainer in self._trainers.values())):
            counted.update(counters)
        return counted

    def _serve_version(self, name: str) -> None:
        trainer = self._trainers[name]
        with self._service.explained("saving weights for the sampler"):
            sampler = self._service.ready(trainer.client.save_weights_and_get_sampling_client)
        self._samplers.served[name] = Served(trainer.version, sampler, frozenset(self._texts[name].eos_ids))

    def _trainer(self, name: str) -> PolicyTrainer:
        if name not in self._trainers:
            raise EngineError(f"There is no policy '{name}' that is trained. {nearest(name, self._trainers)}")
        return self._trainers[name]


if __name__ == "__main__":
    main()
