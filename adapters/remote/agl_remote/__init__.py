"""Agents that run as services elsewhere, for agl: over plain HTTP, or A2A."""

from agl_remote.agent import RemoteAgent as RemoteAgent
