"""veRL's vLLM servers, with a gate before them (`agl_verl.gate`). Imports veRL and vLLM."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import ray
from starlette.types import ASGIApp
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from agl_verl.environment import KEY_VARIABLE
from agl_verl.gate import Gate, GatedApp

TOOL_PARSERS = "vllm.tool_parsers"
"""The logger of all of vLLM's parsers of tool calls."""


class VersionedReplies(GatedApp):
    """The gate as vLLM puts it around its app, by name."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, lambda scope: scope["app"].state.args.agl_gate, os.environ[KEY_VARIABLE])


class VersionedServer(vLLMHttpServer):  # type: ignore[misc]
    """A server whose replies name the version of the policy."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._gate = Gate()
        super().__init__(*arguments, **settings)

    async def run_server(self, args: argparse.Namespace) -> None:
        # A tool call that cannot be parsed is a reply like others: vLLM would write a traceback for each.
        logging.getLogger(TOOL_PARSERS).setLevel(logging.CRITICAL)
        args.agl_gate = self._gate
        args.middleware = [*(args.middleware or ()), f"{__name__}.{VersionedReplies.__name__}"]
        await super().run_server(args)

    async def abort_all_requests(self, *arguments: Any, **settings: Any) -> Any:
        self._gate.close()
        return await super().abort_all_requests(*arguments, **settings)

    async def set_global_steps(self, global_steps: int) -> None:
        await super().set_global_steps(global_steps)
        self._gate.version = global_steps

    async def open_submission_gate(self) -> None:
        await super().open_submission_gate()
        self._gate.open()


class VersionedReplica(vLLMReplica):  # type: ignore[misc]
    """A serving replica made of such servers."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.server_class = ray.remote(VersionedServer)


def register_servers() -> None:
    """Make veRL's `rollout.name=vllm` stand for these servers in this process."""
    RolloutReplicaRegistry.register("vllm", lambda: VersionedReplica)
