"""Workers: they lease rollouts, run the agent, and report how each attempt ended."""

from agl_core.worker.agent import Agent, AgentContext, load_agent
from agl_core.worker.environment import Ended, Runner, agent_environment, client_variables
from agl_core.worker.remote import RemoteAgent
from agl_core.worker.runners.choosing import choose_runner
from agl_core.worker.runners.in_process import InProcess
from agl_core.worker.runners.isolated import CommandPerAttempt, ProcessPerAttempt
from agl_core.worker.worker import Worker, WorkerThread

__all__ = [
    "Agent",
    "AgentContext",
    "CommandPerAttempt",
    "Ended",
    "InProcess",
    "ProcessPerAttempt",
    "RemoteAgent",
    "Runner",
    "Worker",
    "WorkerThread",
    "agent_environment",
    "choose_runner",
    "client_variables",
    "load_agent",
]
