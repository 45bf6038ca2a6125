"""One run's parts, started in order and stopped in reverse; the server is in this process or elsewhere."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import to_jsonable_python

from agl_core.capture import attach, installed_adapters
from agl_core.client import FarServer, WorkerThread, agent_environment, choose_runner, client_variables
from agl_core.config.load import LoadedConfig
from agl_core.errors import EngineError
from agl_core.protocols import Engine, EngineContext, PolicySpec, TaskSource
from agl_core.server import LightningServer
from agl_core.training.collect import Collector
from agl_core.training.evaluate import Evaluator
from agl_core.training.progress import Observer
from agl_core.training.recorded import scoring_rules
from agl_core.training.serving import Serving, check_reachable, registration
from agl_core.wire.operators import BeginRequest, FinishRequest


@dataclass(frozen=True)
class Session:
    """Everything that is running."""

    serving: Serving
    """The server, as the trainer uses it."""
    incarnation: int
    engine: Engine
    versions: dict[str, int]
    """The version being served of each policy, at the start."""
    worker: WorkerThread | None
    """None: the rollouts are left to workers elsewhere."""
    collector: Collector
    evaluator: Evaluator
    tasks: Mapping[str, TaskSource]


@asynccontextmanager
async def open_session(
    loaded: LoadedConfig,
    run_dir: Path,
    server: LightningServer | FarServer,
    observer: Observer,
    *,
    weights: Path | None = None,
    resumed_step: int | None = None,
) -> AsyncIterator[Session]:
    """Begin a run's next incarnation on a server, start the engine and, if the server is in this process, a worker.

    `weights` is a checkpoint to start from, of the step `resumed_step`.
    """
    config = loaded.config
    near = server if isinstance(server, LightningServer) else None
    serving: Serving = server.run if isinstance(server, LightningServer) else server
    tasks = {name: chosen.build(loaded.folder, config.seed) for name, chosen in loaded.tasks.items()}
    rules = scoring_rules(loaded)  # Here, for what they lack is to be told before an engine is started.
    began = BeginRequest(
        run=run_dir.name, started=time.time(), config=config.model_dump(mode="json"), resumed_step=resumed_step
    )
    incarnation = (await serving.begin(began)).incarnation
    async with AsyncExitStack() as stack:
        observer.say("starting the engine")
        engine: Engine = loaded.engine.build(engine_context(loaded, run_dir))
        stack.push_async_callback(engine.stop)
        upstream = await engine.start()
        if near is None:
            check_reachable(upstream, server.base_url)
        if weights is not None:
            await engine.load(weights)
        versions = dict(await engine.versions())
        expires = config.server.lease if near is None else None
        await serving.serve(registration(config, incarnation, upstream, versions, expires))
        stack.push_async_callback(serving.finish, FinishRequest(incarnation=incarnation, over=False))
        worker = None
        if near is not None and config.workers.embedded:
            worker = await start_worker(loaded, near, stack)
        else:
            target = str(run_dir) if near is not None else f"CONFIG --server {server.base_url}"
            observer.say(f"leaving the rollouts to workers, which join with: agl worker {target}")
        collector = Collector(
            serving.store,
            serving.queue,
            rules,
            config.train.endings,
            loaded.plugins.hook,
            health_check(worker) if isinstance(server, LightningServer) else server.check,
        )
        held_out = {name: source for name, source in tasks.items() if name != "train"}
        evaluator = Evaluator(collector, held_out, config.eval, run_dir.name, incarnation, observer)
        yield Session(serving, incarnation, engine, versions, worker, collector, evaluator, tasks)


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
                algorithm=loaded.policies[name].algorithm.component.name,
                algorithm_options=to_jsonable_python(loaded.policies[name].algorithm.options.model_dump()),
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
    config = loaded.config
    if config.agent.attach:
        attach(installed_adapters(loaded.plugins))
    worker = WorkerThread(
        await asyncio.to_thread(
            choose_runner,
            config.agent,
            config.workers,
            folder=loaded.folder,
            plugins=config.plugins,
            base_url=server.base_url,
        ),
        base_url=server.base_url,
        worker_key=server.worker_key,
        concurrency=config.workers.concurrency,
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
