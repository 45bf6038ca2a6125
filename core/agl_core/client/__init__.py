"""Lightning Client: workers that lease rollouts and run the agent."""

from agl_core.client.agent import Agent, AgentContext, load_agent
from agl_core.client.api import LightningClient
from agl_core.client.worker import Worker, WorkerThread

__all__ = ["Agent", "AgentContext", "LightningClient", "Worker", "WorkerThread", "load_agent"]
