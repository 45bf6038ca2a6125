"""One run's parts on one machine, started in order and stopped in reverse: the embedded shape of agl."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from agl_core.capture import attach
from agl_core.client import WorkerThread, load_agent
from agl_core.config.load import LoadedConfig
from agl_core.errors import EngineError
from agl_core.plugins import Kind
from agl_core.protocols import Adapter, Engine, EngineContext, PolicySpec, TaskSource
from agl_core.server import LightningServer
from agl_core.store.interface import Store
from agl_core.training.collect import Collector
from agl_core.training.evaluate import Evaluator
from agl_core.training.progress import Observer
from agl_core.training.recorded import scoring_rules


@dataclass(frozen=True)
class Session:
    """Everything that is running."""

    store: Store
    engine: Engine
    server: LightningServer
    worker: WorkerThread
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
        )
        await stack.enter_async_context(server)
        server.versions.update(await engine.versions())
        stack.enter_context(agent_environment(server.base_url, server.agent_key))
        if config.agent.attach:
            attach(adapters(loaded))
        worker = WorkerThread(
            await asyncio.to_thread(load_agent, config.agent.entry, loaded.folder),
            base_url=server.base_url,
            worker_key=server.worker_key,
            agent_key=server.agent_key,
            concurrency=config.workers.concurrency,
        )
        worker.start()
        stack.push_async_callback(worker.stop)
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
        plugin_files=config.plugins,
        api_key=os.urandom(16).hex(),
    )


def adapters(loaded: LoadedConfig) -> list[Adapter]:
    """Every installed adapter; each attaches when its framework is imported."""
    found = loaded.plugins.components(Kind.ADAPTER).values()
    return [component.build(component.options()) for component in found]


@contextmanager
def agent_environment(base_url: str, key: str) -> Iterator[None]:
    """The variables that send an unmodified agent's LLM client to the gateway; restored afterwards."""
    wanted = {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_BASE": f"{base_url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def health_check(worker: WorkerThread) -> Callable[[], None]:
    """Raises once the worker is gone, so that the trainer does not wait for rollouts that nobody runs."""

    def check() -> None:
        if not worker.alive:
            raise EngineError("The worker stopped unexpectedly; see the log above. The run can be resumed.")

    return check
