"""The typed clients of a Lightning Server, and where to find one."""

from agl_core.client.discovery import ServerAddress, find_server, is_over
from agl_core.client.http import BlockingClient, LightningClient, RefusedError, UnreachableError

__all__ = [
    "BlockingClient",
    "LightningClient",
    "RefusedError",
    "ServerAddress",
    "UnreachableError",
    "find_server",
    "is_over",
]
