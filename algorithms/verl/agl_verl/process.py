"""The driver: `python -m agl_verl.process`, started by `agl_verl.engine.VerlEngine`. It is veRL's single controller.

It reads its settings and then commands from standard input, answers each with one line of JSON on standard output,
writes its log to standard error, and ends when standard input ends: it cannot outlive whoever started it. It ends, too,
with a last line, when a node or a process of the engine is lost.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import orjson

from agl_core.errors import AglError, ConfigError, EngineError
from agl_core.plugins import Kind, Plugins
from agl_core.wire.updates import UpdateRequest, encode_result
from agl_verl import checkpoint, config, versions
from agl_verl import cpu as cpu_mending
from agl_verl.environment import variables
from agl_verl.faults import first_line, remedy_of
from agl_verl.native import NativeOptions
from agl_verl.wire import SECONDS_TO_NOTICE, Answer, Command, Ready, Settings

if TYPE_CHECKING:
    from agl_verl.trainer import AglTrainer
    from agl_verl.watch import Watch

SECONDS_TO_MISS_AN_ACTOR = 5.0
"""How long an error waits on one node for what was lost, if that is its reason."""

_log = logging.getLogger(__name__)


def main() -> int:
    """Bring everything up, announce it, do what is asked. Returns the exit code."""
    answers = _keep_standard_output()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = Settings.model_validate_json(sys.stdin.buffer.readline())
    commands: queue.SimpleQueue[tuple[Command, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(sys.stdin.buffer, commands), name="agl-parent", daemon=True).start()
    try:
        driver = Driver(settings)
    except Exception as error:
        _log.exception("The engine cannot start.")
        _write(answers, Ready(error=_described(error).error))
        return 1
    _write(answers, Ready(urls=driver.urls, context_length=driver.trainer.context_length))
    threading.Thread(target=_end_when_lost, args=(driver.watch, answers), name="agl-watch", daemon=True).start()
    while True:
        command, body = commands.get()
        try:
            answer = Answer(value=driver.do(command, body))
        except Exception as error:
            _log.exception("The engine failed in '%s'.", command.do)
            if not isinstance(error, AglError):  # Of a loss, `_end_when_lost` has more to tell.
                time.sleep(SECONDS_TO_NOTICE if driver.watch.on_several_nodes else SECONDS_TO_MISS_AN_ACTOR)
            answer = _described(error)
        _write(answers, answer)


class Driver:
    """veRL's trainer and what it stands on, started."""

    def __init__(self, settings: Settings) -> None:
        options = settings.options
        self._settings = settings
        cpu = cpu_mending.is_wanted(options.device, options.address)
        versions.check(cpu=cpu)
        self._check_gpus(cpu)
        self._chosen_options = self._algorithm_options()
        composed = config.compose(settings, algorithm=self._chosen_options, cpu=cpu)
        native = self._chosen_options if isinstance(self._chosen_options, NativeOptions) else None
        environment = variables(
            cpu=cpu,
            api_key=settings.api_key,
            deterministic=settings.deterministic,
            cache_mib=options.cache_mib,
            modules=() if native is None else native.modules,
        )
        os.environ.update(environment)
        # Only now: veRL reads its environment when it is imported.
        import transfer_queue
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

        from agl_verl import cluster
        from agl_verl.losses import ChosenAlgorithm
        from agl_verl.manager import TransitionManager
        from agl_verl.placements import SeparateTrainer, SharedTrainer
        from agl_verl.registries import check_registered
        from agl_verl.serving import register_servers
        from agl_verl.watch import Watch

        if native is not None:
            check_registered(native)
        cluster.connect(options, cpu=cpu, variables=environment, verl_environment=get_ppo_ray_runtime_env(composed))
        register_servers()
        transfer_queue.init(composed.transfer_queue)
        spec = settings.spec
        chosen = native or ChosenAlgorithm.of(spec.algorithm, spec.algorithm_options, settings.plugin_files)
        trainer_class = SeparateTrainer if options.serving_gpus else SharedTrainer
        self.trainer: AglTrainer = trainer_class(config=composed)
        self.trainer.start(chosen, TransitionManager(), settings.seed)
        self.watch = Watch()
        self._failed: str | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        """Where the servers answer."""
        return tuple(f"http://{address}/v1" for address in self.trainer.servers.get_addresses())

    def do(self, command: Command, body: bytes) -> dict[str, Any]:
        """One command; after one that failed half-way, none is obeyed any more."""
        if self._failed is not None:
            raise EngineError(f"The engine failed earlier ({self._failed}). Resume the run from its last checkpoint.")
        try:
            if command.do == "update":
                return self._update(UpdateRequest.decode(body))
            assert command.folder is not None
            folder = command.folder / self._settings.policy
            if command.do == "save":
                self._save(folder)
            else:
                self._load(folder)
        except AglError:
            raise
        except Exception as error:
            self._failed = first_line(error)
            raise
        return {"version": self.trainer.version}

    def _update(self, request: UpdateRequest) -> dict[str, Any]:
        spec = self._settings.spec
        if (request.algorithm, dict(request.options)) != (spec.algorithm, dict(spec.algorithm_options)):
            raise EngineError(
                f"The veRL engine was started for the algorithm '{spec.algorithm}' and its options; it cannot make an "
                f"update with '{request.algorithm}' or other options."
            )
        return encode_result(self.trainer.update(request.batch))

    def _save(self, folder: Path) -> None:
        self.trainer.save(checkpoint.shards(folder))
        described = checkpoint.Described(self.trainer.version, self._workers, self.trainer.use_critic)
        checkpoint.finish(folder, described)

    def _load(self, folder: Path) -> None:
        described = checkpoint.read(folder, workers=self._workers, critic=self.trainer.use_critic)
        self.trainer.load(checkpoint.shards(folder), described.version)

    @property
    def _workers(self) -> int:
        return self._settings.options.nodes * self._settings.options.gpus_per_node

    def _algorithm_options(self) -> Any:
        spec = self._settings.spec
        component = Plugins.load(self._settings.plugin_files).component(
            Kind.ALGORITHM, spec.algorithm, "algorithm.name"
        )
        try:
            return component.options.model_validate(dict(spec.algorithm_options))
        except ValueError as error:
            raise ConfigError(f"algorithm.{spec.algorithm}: {error}") from error

    def _check_gpus(self, cpu: bool) -> None:
        if cpu or self._settings.options.address is not None:
            return
        import torch

        if not torch.cuda.is_available():
            raise EngineError(
                "engine.verl.device is 'cuda', and torch finds no CUDA GPU here. Use device = 'cpu' for a tiny model, "
                "join a cluster that has GPUs with engine.verl.address, or install a torch build for your GPU."
            )


def _described(error: Exception) -> Answer:
    """An error on purpose crosses as it is; any other with what to do about it, if that is known."""
    if isinstance(error, AglError):
        return Answer(error=str(error), kind=type(error).__name__)
    remedy = remedy_of(f"{type(error).__name__}: {error}")
    return Answer(error=f"{first_line(error)}.{' ' + remedy if remedy else ''}", kind="EngineError")


def _end_when_lost(watch: Watch, answers: IO[bytes]) -> None:
    """Nothing works without what was lost, and what waits for it may wait for ever: tell, and end."""
    lost = watch.wait()
    _log.error("%s", lost)
    _write(answers, Answer(error=lost, kind=EngineError.__name__))
    os._exit(1)


def _keep_standard_output() -> IO[bytes]:
    """Standard output for our lines alone; whatever a library prints goes to the log."""
    kept = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return kept


def _write(answers: IO[bytes], answer: Ready | Answer) -> None:
    answers.write(orjson.dumps(answer.model_dump(mode="json")) + b"\n")
    answers.flush()


def _read_commands(source: IO[bytes], commands: queue.SimpleQueue[tuple[Command, bytes]]) -> None:
    """Until the run ends, which ends this process and with it a local Ray."""
    while line := source.readline():
        command = Command.model_validate_json(line)
        commands.put((command, source.read(command.size)))
    ray = sys.modules.get("ray")
    if ray is not None:
        ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
