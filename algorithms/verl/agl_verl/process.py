"""The driver: `python -m agl_verl.process`, started by `agl_verl.plugin.VerlEngine`. It is veRL's single controller.

It ends, with a last word to the run, when a node or a process of the engine is lost.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agl_core.errors import AglError, EngineError, nearest
from agl_core.protocols import EngineContext, Progress, ResponseScores, UpdateResult
from agl_core.types import Batch, Call
from agl_server.engines.child import Host, in_one_line
from agl_verl import checkpoint
from agl_verl.config import ChosenAlgorithm, compose, optimizers
from agl_verl.environment import check_flash_attention, check_versions, runs_on_cpu, variables
from agl_verl.options import VerlOptions

if TYPE_CHECKING:
    from agl_verl.trainer import AglTrainer

SECONDS_TO_MISS_A_NODE = 90.0
"""How long an error waits for what was lost, if that may be its reason: Ray missed a killed node in 15 seconds."""
SECONDS_TO_MISS_AN_ACTOR = 5.0
"""The same on one node."""


def main() -> None:
    host = Host.connect(VerlOptions, at_end=_shut_ray_down)
    with host.starting():
        driver = Driver(host.options, host.context, host.stage)
    threading.Thread(target=lambda: host.lost(driver.watch.wait()), name="agl-watch", daemon=True).start()
    host.serve(driver)


class Driver:
    """veRL's trainer and what it stands on, started; see `agl_server.engines.child.Host.serve`."""

    def __init__(self, options: VerlOptions, context: EngineContext, stage: Callable[[str], None]) -> None:
        stage("checking versions and settings")
        self._specs = context.policies
        self._workers = options.nodes * options.gpus_per_node
        self._failed: str | None = None
        cpu = runs_on_cpu(options.device, options.address)
        check_versions(cpu=cpu)
        self._check_adapters()
        algorithm = ChosenAlgorithm.of_run(context).build()
        composed = compose(options, context, algorithm=algorithm, cpu=cpu)
        if not cpu and composed.model_engine != "megatron":  # Which brings attention of its own.
            check_flash_attention(options.attention, critic=algorithm.needs_critic)
        environment = variables(
            cpu=cpu,
            api_key=context.api_key,
            deterministic=context.deterministic,
            cache_mib=options.cache_mib,
        )
        os.environ.update(environment)
        # Only now: veRL reads its environment when it is imported.
        import transfer_queue
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

        from agl_chat.conversation import load_text
        from agl_verl.cluster import Watch, connect
        from agl_verl.servers import register_servers
        from agl_verl.trainer import Policy, SeparateTrainer, SharedTrainer

        stage("starting Ray" if options.address is None else f"joining the Ray cluster at {options.address}")
        connect(options, cpu=cpu, variables=environment, verl_environment=get_ppo_ray_runtime_env(composed))
        register_servers()
        transfer_queue.init(composed.transfer_queue)
        trainer_class = SeparateTrainer if options.serving_gpus else SharedTrainer
        self._trainer: AglTrainer = trainer_class(config=composed)
        chosen = ChosenAlgorithm.of_policies(context)
        policies = [
            Policy(name, chosen[name], optimizers(options, spec, chosen[name].build()))
            for name, spec in context.policies.items()
        ]
        self._trainer.start(policies, context.seed, options.sequence_parallel, stage)
        self.urls = tuple(f"http://{address}/v1" for address in self._trainer.servers.get_addresses())
        self.context_length = self._trainer.context_length
        self._texts = {
            name: load_text(spec.model, trust_remote_code=spec.trust_remote_code)
            for name, spec in context.policies.items()
        }
        self.watch = Watch()

    def update(self, policy: str, batch: Batch, progress: Progress) -> UpdateResult:
        if policy not in self._specs:
            raise EngineError(f"There is no policy '{policy}'. {nearest(policy, self._specs)}")
        with self._usable():
            result = self._trainer.update(policy, batch, progress)
        progress(1.0)
        return result

    def logprobs(self, policy: str, batch: Batch) -> ResponseScores:
        with self._usable():
            return self._trainer.logprobs(policy, batch)

    def tokenize(self, policy: str, calls: Sequence[Call]) -> Sequence[Call]:
        from agl_chat.conversation import tokenized

        return [tokenized(self._texts[policy], call) for call in calls]

    def save(self, folder: Path) -> None:
        """Write the policies below `folder`, which every node of the cluster has to see."""
        with self._usable():
            for name, spec in self._specs.items():
                self._trainer.save(name, checkpoint.shards(folder / name))
                version, critic = self.versions()[name], self._trainer.use_critic
                checkpoint.finish(folder / name, spec, version=version, workers=self._workers, critic=critic)

    def load(self, folder: Path) -> None:
        with self._usable():
            for name, policy in self._trainer.policies.items():
                critic = policy.chosen.build().needs_critic
                version = checkpoint.read(folder / name, workers=self._workers, critic=critic)
                self._trainer.load(name, checkpoint.shards(folder / name), version)

    def versions(self) -> Mapping[str, int]:
        return {name: policy.version for name, policy in self._trainer.policies.items()}

    def stats(self) -> Mapping[str, float]:
        """tokens_prefilled, tokens_reused, tokens_decoded since the start, over all servers."""
        with self._usable():
            return self._trainer.counters()

    def _check_adapters(self) -> None:
        from torch import device
        from transformers import AutoConfig, AutoModelForCausalLM

        from agl_algorithms.fingerprints import check_targets

        for spec in self._specs.values():
            if spec.lora is not None:
                config = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
                with device("meta"):
                    model = AutoModelForCausalLM.from_config(config, trust_remote_code=spec.trust_remote_code)  # type: ignore[no-untyped-call]
                check_targets(model, spec.lora.targets)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Refuse everything after a failure half-way: it leaves nothing that could be used."""
        if self._failed is not None:
            raise EngineError(f"The engine failed earlier ({self._failed}). Resume the run from its last checkpoint.")
        try:
            yield
        except AglError:
            raise
        except Exception as error:
            self._failed = in_one_line(error)
            # Of a loss the watch knows more, and ends this process.
            time.sleep(SECONDS_TO_MISS_A_NODE if self.watch.on_several_nodes else SECONDS_TO_MISS_AN_ACTOR)
            raise


def _shut_ray_down() -> None:
    ray = sys.modules.get("ray")
    if ray is not None:
        ray.shutdown()


if __name__ == "__main__":
    main()
