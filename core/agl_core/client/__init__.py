"""The typed clients of a Lightning Server, and where to find one."""

from agl_core.client.discovery import ServerAddress, find_server, is_over
from agl_core.client.http import BlockingClient, LightningClient, RefusedError, UnreachableError
from agl_core.client.remote import RemoteServer, RemoteStore

__all__ = [
    "BlockingClient",
    "LightningClient",
    "RefusedError",
    "RemoteServer",
    "RemoteStore",
    "ServerAddress",
    "UnreachableError",
    "find_server",
    "is_over",
]
