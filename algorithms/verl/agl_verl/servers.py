"""veRL's vLLM servers behind agl's chat layer and a gate (`agl_verl.gate`). Imports veRL and vLLM.

A chat completion is answered by the chat layer, which asks the server's own route for tokens, in this process. That
request passes the gate, so that a response that an exchange of weights disturbs is sampled again.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import ray
import torch
from starlette.types import ASGIApp, Receive, Scope, Send
from torch import Tensor
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from agl_chat.api import CHAT_COMPLETIONS, ModelServer, create_app
from agl_chat.backends import VllmBackend, client_of
from agl_chat.conversation import load_text
from agl_verl.environment import KEY_VARIABLE
from agl_verl.gate import Gate, GatedApp


class ChatServer:
    """Chat layer and gate as vLLM puts them around its app, by name."""

    def __init__(self, app: ASGIApp) -> None:
        self._key = os.environ[KEY_VARIABLE]
        self._gated = GatedApp(app, lambda scope: scope["app"].state.args.agl_gate, self._key)
        self._chat: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != CHAT_COMPLETIONS:
            await self._gated(scope, receive, send)
            return
        if self._chat is None:
            self._chat = self._make_chat(scope["app"])
        await self._chat({**scope}, receive, send)

    def _make_chat(self, vllm: Any) -> ASGIApp:
        state = vllm.state
        text, name = state.args.agl_text, state.openai_serving_models.base_model_paths[0].name
        model = ModelServer(name, text, state.engine_client.model_config.max_model_len)
        backend = VllmBackend(client_of(vllm, self._key), text.eos_ids)
        return create_app({name: model}, backend, api_key=self._key)


class VersionedServer(vLLMHttpServer):  # type: ignore[misc]
    """A server whose replies name the version of the policy."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._gate = Gate()
        super().__init__(*arguments, **settings)

    async def run_server(self, args: argparse.Namespace) -> None:
        args.agl_gate = self._gate
        args.agl_text = load_text(args.model, trust_remote_code=args.trust_remote_code)
        args.enable_scale_out = args.enable_prompt_tokens_details = True  # The route for tokens, and what was cached.
        args.middleware = [*(args.middleware or ()), f"{__name__}.{ChatServer.__name__}"]
        await super().run_server(args)

    async def abort_all_requests(self, *arguments: Any, **settings: Any) -> Any:
        await self._gate.close()
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


class CpuWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Takes new weights on a CPU, in vLLM's worker process.

    It takes all at once, as vLLM reloads a checkpoint: that restores the loaders that repacking took.
    """

    def update_weights_from_ipc(
        self, peft_config: object = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Called by veRL on every exchange of weights."""
        if peft_config is not None and base_sync_done:
            raise NotImplementedError("An adapter came unmerged. agl merges it before each exchange (lora.merge).")
        self.device = torch.device("cpu")
        received: list[tuple[str, Tensor]] = []

        def take(weights: list[tuple[str, Tensor]], last: bool) -> None:
            # Copied: on a CPU they are views of shared memory, which is closed afterwards.
            received.extend((name, tensor.clone()) for name, tensor in weights)

        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=take)
        self.reload_weights(weights_iterator=iter(received))
