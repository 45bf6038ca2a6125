"""One run's parts, started in order and stopped in reverse."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import to_jsonable_python

from agl_core.capture import attach, installed_adapters
from agl_core.config.load import LoadedConfig
from agl_core.errors import EngineError
from agl_core.learning import ScoringRule
from agl_core.protocols import Engine, EngineContext, PolicySpec, RecordedTasks, TaskSource
from agl_core.server import LightningServer
from agl_core.training.evaluate import Evaluator
from agl_core.training.metrics import Observer
from agl_core.training.preflight import check_agent, first_made
from agl_core.training.recorded import RecordedQueue
from agl_core.training.rollouts import Collector, Queue, scoring_rules
from agl_core.training.server import begin_restart
from agl_core.training.stall import StallWatch, who_waits
from agl_core.types import AlarmName
from agl_core.worker import Runner, WorkerThread, agent_environment, choose_runner, client_variables


@dataclass(frozen=True)
class Session:
    """Everything that is running."""

    server: LightningServer
    run: str
    """The run's name in its store."""
    restart: int
    engine: Engine
    worker: WorkerThread | None
    """None: the rollouts are left to workers elsewhere."""
    collector: Collector
    evaluator: Evaluator
    tasks: Mapping[str, TaskSource]
    stall: StallWatch

    @property
    def versions(self) -> dict[str, int]:
        """The version being served of each policy; the gateway records them with the calls."""
        return self.server.versions


@asynccontextmanager
async def open_session(
    loaded: LoadedConfig,
    run_dir: Path,
    server: LightningServer,
    observer: Observer,
    *,
    weights: Path | None = None,
    resumed_step: int | None = None,
) -> AsyncIterator[Session]:
    """Begin a run's next restart on its server, start the engine and, unless workers are elsewhere, a worker.

    `weights` is a checkpoint to start from; `resumed_step` its step, if training goes on from there.
    """
    config = loaded.config
    # Errors in tasks, rules or the agent are raised before an engine is started, which takes long.
    tasks = {name: first_made(name, chosen.build(loaded.folder, config.seed)) for name, chosen in loaded.tasks.items()}
    rules = scoring_rules(loaded)
    source = tasks["train"]
    check_agent(config, source)
    has_worker = config.workers.embedded and config.agent is not None
    runner = await choose_own_runner(loaded, server.base_url) if has_worker else None
    run = await begin_restart(server, config, run_dir, resumed_step)
    async with AsyncExitStack() as stack:
        engine = await _started_engine(loaded, run_dir, server, observer, stack, weights)
        worker = None
        if runner is not None:
            # Until the stack is closed, clients that agents make find the server.
            stack.enter_context(agent_environment(client_variables(server.base_url)))
            worker = WorkerThread(
                runner, base_url=server.base_url, worker_key=server.worker_key, concurrency=config.workers.concurrency
            )
            worker.start()
            stack.push_async_callback(worker.stop)
        elif config.agent is not None:
            observer.say(f"leaving the rollouts to workers, which join with: agl worker {run_dir}")
        setting = config.alarms.get(AlarmName.STALL)
        stall = StallWatch(setting, lambda: who_waits(server.activity(), server.store), observer.say)

        def collector(queue: Queue, rules: Sequence[ScoringRule]) -> Collector:
            hook, is_well = loaded.plugins.hook, health_check(worker)
            return Collector(server.store, queue, rules, config.train.endings, hook, is_well, stall)

        of_agent = of_training = collector(server.queue, rules)
        held_out = {name: tasks[name] for name in tasks if name != "train"}
        evaluator = Evaluator(of_agent, held_out, config.eval, run.id, run.restart, observer)
        if isinstance(source, RecordedTasks):
            queue = RecordedQueue(source, config, server.store, engine)
            of_training = collector(queue, rules if config.rewards else [ScoringRule("recorded", queue.reward)])
        yield Session(server, run.id, run.restart, engine, worker, of_training, evaluator, tasks, stall)


async def _started_engine(
    loaded: LoadedConfig,
    run_dir: Path,
    server: LightningServer,
    observer: Observer,
    stack: AsyncExitStack,
    weights: Path | None,
) -> Engine:
    """The engine, serving the policies through the server until the stack is closed."""
    observer.say("starting the engine")
    engine: Engine = loaded.engine.build(engine_context(loaded, run_dir))
    stack.push_async_callback(engine.stop)
    engine.report_stages(lambda stage, seconds: observer.say(f"the engine, after {seconds:.0f} s: {stage}"))
    upstream = await engine.start()
    observer.serving(upstream)
    if weights is not None:
        await engine.load(weights)
    server.serve(upstream, await engine.versions())
    stack.callback(server.withdraw)
    return engine


def engine_context(loaded: LoadedConfig, run_dir: Path) -> EngineContext:
    """The engine's part of the configuration."""
    config = loaded.config
    return EngineContext(
        run_dir=run_dir,
        seed=config.seed,
        policies={
            name: PolicySpec(
                model=loaded.weights(name),
                dtype=policy.model.dtype,
                trust_remote_code=policy.model.trust_remote_code,
                lora=policy.model.lora.model_dump() if policy.model.lora else None,
                optimizer=policy.optimizer.model_dump(),
                algorithm=loaded.policies[name].algorithm.component.name,
                algorithm_options=to_jsonable_python(loaded.policies[name].algorithm.options.model_dump()),
                name=policy.model.path,
            )
            for name, policy in config.policies.items()
        },
        deterministic=config.train.deterministic,
        steps=config.train.steps,
        plugin_files=config.plugin_files,
        api_key=os.urandom(16).hex(),
    )


async def choose_own_runner(loaded: LoadedConfig, base_url: str) -> Runner:
    """The runner of the agent in this process, imported; clients that its import makes find the server."""
    config = loaded.config
    assert config.agent is not None
    with agent_environment(client_variables(base_url)):
        if config.agent.attach:
            attach(installed_adapters(loaded.plugins))
        return await asyncio.to_thread(
            choose_runner,
            config.agent,
            config.workers,
            folder=loaded.folder,
            plugins=config.plugin_files,
            base_url=base_url,
        )


def health_check(worker: WorkerThread | None) -> Callable[[], None]:
    """Raises once rollouts are no longer run: this process's worker is gone."""

    def check() -> None:
        if worker is not None and not worker.alive:
            raise EngineError("The worker stopped unexpectedly; see the log above. The run can be resumed.")

    return check
