"""Serving: one thread for tensors, one OpenAI-compatible HTTP API."""

from agl_torch.serve.app import create_app, guarded
from agl_torch.serve.loop import EngineLoop
from agl_torch.serve.model import ServedModel

__all__ = ["EngineLoop", "ServedModel", "create_app", "guarded"]
