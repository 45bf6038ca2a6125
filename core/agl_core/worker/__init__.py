"""Workers: they lease rollouts, run the agent, and report how each attempt ended."""

from agl_core.worker.agent import (
    Agent,
    AgentContext,
    Ended,
    TaskPerAttempt,
    agent_environment,
    client_variables,
    load_agent,
)
from agl_core.worker.commands import CommandPerAttempt
from agl_core.worker.processes import ProcessPerAttempt
from agl_core.worker.worker import Runner, Worker, WorkerThread, choose_runner

__all__ = [
    "Agent",
    "AgentContext",
    "CommandPerAttempt",
    "Ended",
    "ProcessPerAttempt",
    "Runner",
    "TaskPerAttempt",
    "Worker",
    "WorkerThread",
    "agent_environment",
    "choose_runner",
    "client_variables",
    "load_agent",
]
