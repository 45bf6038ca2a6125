"""Which way of running attempts a configuration asks for."""

from __future__ import annotations

import shlex

from agl_core.client.agent import load_agent
from agl_core.client.attempts import Runner
from agl_core.client.in_process import InProcess
from agl_core.client.isolated import CommandPerAttempt, ProcessPerAttempt
from agl_core.config.load import LoadedConfig


def choose_runner(loaded: LoadedConfig, base_url: str) -> Runner:
    """What runs the attempts of this configuration's agent, for the server at `base_url`.

    A Python agent is imported, so adapters are to be attached before. AgentError if that fails.
    """
    agent, workers = loaded.config.agent, loaded.config.workers
    plugins = loaded.config.plugins if agent.attach else None
    memory = None if workers.memory_mib is None else workers.memory_mib * 2**20
    if agent.command is not None:
        command = shlex.split(agent.command) if isinstance(agent.command, str) else list(agent.command)
        return CommandPerAttempt(command, loaded.folder, plugins=plugins, memory=memory)
    assert agent.entry is not None
    imported = load_agent(agent.entry, loaded.folder)
    if workers.isolation == "none" or (workers.isolation == "auto" and imported.is_async):
        return InProcess(imported)
    return ProcessPerAttempt(
        agent.entry,
        loaded.folder,
        base_url=base_url,
        plugins=plugins,
        memory=memory,
    )
