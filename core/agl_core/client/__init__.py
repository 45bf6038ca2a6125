"""Lightning Client: workers that lease rollouts and run the agent, and the typed clients of a Lightning Server."""

from agl_core.client.agent import Agent, AgentContext, load_agent
from agl_core.client.api import BlockingClient, LightningClient, RefusedError, UnreachableError
from agl_core.client.attempts import Ended, Runner, agent_environment, client_variables
from agl_core.client.choosing import choose_runner
from agl_core.client.far import FarQueue, FarServer, FarStore
from agl_core.client.finding import Server, find_server, is_over
from agl_core.client.in_process import InProcess
from agl_core.client.isolated import CommandPerAttempt, ProcessPerAttempt
from agl_core.client.worker import Worker, WorkerThread

__all__ = [
    "Agent",
    "AgentContext",
    "BlockingClient",
    "CommandPerAttempt",
    "Ended",
    "FarQueue",
    "FarServer",
    "FarStore",
    "InProcess",
    "LightningClient",
    "ProcessPerAttempt",
    "RefusedError",
    "Runner",
    "Server",
    "UnreachableError",
    "Worker",
    "WorkerThread",
    "agent_environment",
    "choose_runner",
    "client_variables",
    "find_server",
    "is_over",
    "load_agent",
]
