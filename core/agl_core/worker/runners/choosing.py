"""Which way of running attempts a configuration asks for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from agl_core.config.models import AgentSection, WorkerSection
from agl_core.worker.agent import load_agent
from agl_core.worker.environment import Runner
from agl_core.worker.runners.in_process import InProcess
from agl_core.worker.runners.isolated import CommandPerAttempt, ProcessPerAttempt
from agl_core.worker.runners.moving import MovesOut


def choose_runner(
    agent: AgentSection, workers: WorkerSection, *, folder: Path, plugins: Sequence[Path], base_url: str
) -> Runner:
    """What runs the attempts of this agent, for the server at `base_url`.

    `folder` is where its module is found too, or where its command runs; `plugins` are files whose adapters are to be
    attached. A Python agent is imported, so adapters are to be attached here before. AgentError if that fails, or if
    there is no such command.
    """
    attached = plugins if agent.attach else None
    memory = None if workers.memory_mib is None else workers.memory_mib * 2**20
    if agent.command is not None:
        command = shlex.split(agent.command) if isinstance(agent.command, str) else list(agent.command)
        return CommandPerAttempt(command, folder, plugins=attached, memory=memory)
    assert agent.entry is not None
    imported = load_agent(agent.entry, folder)
    if workers.isolation == "none":
        return InProcess(imported)
    processes = ProcessPerAttempt(agent.entry, folder, base_url=base_url, plugins=attached, memory=memory)
    if workers.isolation == "auto" and imported.is_async and memory is None:
        return MovesOut(InProcess(imported), processes)
    return processes
