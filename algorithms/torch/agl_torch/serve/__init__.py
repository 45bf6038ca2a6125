"""Serving: one thread for tensors, one OpenAI-compatible HTTP API."""

from agl_torch.serve.app import create_app
from agl_torch.serve.loop import EngineLoop
from agl_torch.serve.model import ModelServer

__all__ = ["EngineLoop", "ModelServer", "create_app"]
