"""One run's parts on one machine, started in order and stopped in reverse: the embedded shape of agl."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agl_core.capture import attach, installed_adapters
from agl_core.client import WorkerThread, agent_environment, choose_runner, client_variables
from agl_core.config.load import LoadedConfig
from agl_core.errors import EngineError
from agl_core.protocols import Engine, EngineContext, PolicySpec, TaskSource
from agl_core.server import Keys, LightningServer
from agl_core.store.interface import Store
from agl_core.training.collect import Collector
from agl_core.training.evaluate import Evaluator
from agl_core.training.progress import Observer
from agl_core.training.recorded import scoring_rules
from agl_core.wire import SERVER_FILE


@dataclass(frozen=True)
class Session:
    """Everything that is running."""

    store: Store
    engine: Engine
    server: LightningServer
    worker: WorkerThread | None
    """None: the rollouts are left to workers elsewhere."""
    collector: Collector
    evaluator: Evaluator
    tasks: Mapping[str, TaskSource]


@asynccontextmanager
async def open_session(
    loaded: LoadedConfig, run_dir: Path, incarnation: int, store: Store, observer: Observer, weights: Path | None
) -> AsyncIterator[Session]:
    """Start engine, server and worker for a run; `weights` is a checkpoint to start from."""
    config = loaded.config
    tasks = {name: chosen.build(loaded.folder, config.seed) for name, chosen in loaded.tasks.items()}
    async with AsyncExitStack() as stack:
        keys = Keys.of_run(run_dir / SERVER_FILE)
        keys.check_host(config.server.host)
        observer.say("starting the engine")
        engine: Engine = loaded.engine.build(engine_context(loaded, run_dir))
        stack.push_async_callback(engine.stop)
        upstream = await engine.start()
        if weights is not None:
            await engine.load(weights)
        server = LightningServer(
            store,
            upstream,
            sampling=config.sampling,
            seed=config.seed,
            timeout=config.workers.timeout,
            attempts=config.workers.attempts,
            hook=loaded.plugins.hook,
            agents={name: policy.agents for name, policy in config.policies.items()},
            keys=keys,
            **config.server.model_dump(),
        )
        await stack.enter_async_context(server)
        keys.write(run_dir / SERVER_FILE, server.base_url)
        server.versions.update(await engine.versions())
        worker = None
        if config.workers.embedded:
            worker = await start_worker(loaded, server, stack)
        else:
            observer.say(f"leaving the rollouts to workers, which join with: agl worker {run_dir}")
        collector = Collector(
            store, server.queue, scoring_rules(loaded), config.train.endings, loaded.plugins.hook, health_check(worker)
        )
        held_out = {name: source for name, source in tasks.items() if name != "train"}
        evaluator = Evaluator(collector, held_out, config.eval, run_dir.name, incarnation, observer)
        yield Session(store, engine, server, worker, collector, evaluator, tasks)


def engine_context(loaded: LoadedConfig, run_dir: Path) -> EngineContext:
    """What the configuration tells the engine."""
    config = loaded.config
    return EngineContext(
        run_dir=run_dir,
        seed=config.seed,
        policies={
            name: PolicySpec(
                model=policy.model.path,
                dtype=policy.model.dtype,
                trust_remote_code=policy.model.trust_remote_code,
                lora=policy.model.lora.model_dump() if policy.model.lora else None,
                optimizer=policy.optimizer.model_dump(),
            )
            for name, policy in config.policies.items()
        },
        deterministic=config.train.deterministic,
        updates=config.train.steps,
        plugin_files=config.plugins,
        api_key=os.urandom(16).hex(),
    )


async def start_worker(loaded: LoadedConfig, server: LightningServer, stack: AsyncExitStack) -> WorkerThread:
    """A worker in this process, until the stack is closed; so long, clients that agents make find the server."""
    stack.enter_context(agent_environment(client_variables(server.base_url, server.agent_key)))
    if loaded.config.agent.attach:
        attach(installed_adapters(loaded.plugins))
    worker = WorkerThread(
        await asyncio.to_thread(choose_runner, loaded, server.base_url),
        base_url=server.base_url,
        worker_key=server.worker_key,
        concurrency=loaded.config.workers.concurrency,
    )
    worker.start()
    stack.push_async_callback(worker.stop)
    return worker


def health_check(worker: WorkerThread | None) -> Callable[[], None]:
    """Raises once our own worker is gone, so that the trainer does not wait for rollouts that nobody runs."""

    def check() -> None:
        if worker is not None and not worker.alive:
            raise EngineError("The worker stopped unexpectedly; see the log above. The run can be resumed.")

    return check
