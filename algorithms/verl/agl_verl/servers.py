"""veRL's vLLM servers behind agl's chat layer and a gate (`agl_verl.pause`). Imports veRL and vLLM."""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Any

import orjson
import ray
import torch
from starlette.types import ASGIApp
from torch import Tensor
from verl.utils.vllm import TensorLoRARequest
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from agl_chat.api import ModelServer, create_app
from agl_chat.backends import VllmBackend, failure, read_events
from agl_chat.conversation import load_text
from agl_core.errors import EngineError
from agl_verl.environment import KEY_VARIABLE
from agl_verl.pause import FrontApp, Gate, GatedBackend

SECONDS_BETWEEN_LOOKS = 1.0
"""At vLLM's core, which notices its own end."""


class LocalBackend(VllmBackend):
    """vLLM's route for tokens, `serving`, called by the process that has it."""

    def __init__(self, serving: Any, end_ids: Collection[int]) -> None:
        self._serving, self._end_ids = serving, sorted(end_ids)

    async def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
        from vllm.exceptions import VLLMServerError

        try:
            answer = await self._serving.serve_tokens(GenerateRequest.model_validate(body))
        except ValueError as error:  # As vLLM itself takes it.
            raise failure(400, str(error).encode()) from error
        except VLLMServerError as error:
            raise EngineError(f"vLLM cannot answer: {error}") from error
        if (task := asyncio.current_task()) and task.cancelling():
            raise asyncio.CancelledError  # Which vLLM takes for an answer.
        if not hasattr(answer, "model_dump"):
            async for event in read_events(answer):
                yield event
            return
        reply = answer.model_dump()
        if "error" in reply:
            raise failure(reply["error"]["code"], orjson.dumps(reply))
        yield reply


class ChatServer(FrontApp):
    """Chat layer and gate before vLLM's app; vLLM puts it there, by name."""

    def make_chat(self, app: Any) -> ASGIApp:
        from vllm.lora.request import LoRARequest

        state = app.state
        text, policies = state.args.agl_text, state.args.served_model_name
        if state.args.enable_lora:  # Requests that name an adapter get it; to vLLM, the names are also the base's.
            adapters = {name: LoRARequest(name, number, name) for number, name in enumerate(policies, 1)}
            state.openai_serving_models.lora_requests.update(adapters)
        context = state.engine_client.model_config.max_model_len
        backend = GatedBackend(LocalBackend(state.serving_tokens, text.eos_ids), state.args.agl_gate)
        models = {name: ModelServer(name, text, context) for name in policies}
        return create_app(models, backend, api_key=os.environ[KEY_VARIABLE])


class VersionedServer(vLLMHttpServer):  # type: ignore[misc]
    """A server whose replies name the version of the policy; `expect` says whose weights and version come next."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._gate = Gate()
        self._expected = ""
        super().__init__(*arguments, **settings)

    async def expect(self, policy: str) -> None:
        """From now on weights and versions are this policy's."""
        self._expected = policy

    async def counters(self) -> Counter[str]:
        """Token counts since the start; see `Gate`."""
        return self._gate.counters

    async def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        if method == "update_weights_from_ipc" and self.lora_as_adapter:
            model = self.model_config
            shape = {"r": model.lora_rank, "lora_alpha": model.lora_alpha, "target_modules": list(model.target_modules)}
            number = 1 + list(self.config.engine_kwargs["vllm"]["served_model_name"]).index(self._expected)
            adapter = {"adapter": number, "peft_config": shape, "base_sync_done": True}
            kwargs = {**(kwargs or {}), **adapter}
        await super().collective_rpc(method, timeout, args, kwargs)

    async def run_server(self, args: argparse.Namespace) -> None:
        args.agl_gate = self._gate
        args.agl_text = load_text(args.model, trust_remote_code=args.trust_remote_code)
        args.enable_scale_out = args.enable_prompt_tokens_details = True  # The route for tokens, and what was cached.
        args.max_loras = args.max_cpu_loras or 1  # veRL's is 1.
        args.middleware = [*(args.middleware or ()), f"{__name__}.{ChatServer.__name__}"]
        await super().run_server(args)
        threading.Thread(target=self._follow_the_core, name="agl-core", daemon=True).start()

    def _follow_the_core(self) -> None:
        """End with vLLM's core: Ray misses this process (`agl_verl.cluster`), and knows nothing of that one."""
        while not self.engine.errored:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    async def abort_all_requests(self, *arguments: Any, **settings: Any) -> Any:
        await self._gate.close()
        return await super().abort_all_requests(*arguments, **settings)

    async def set_global_steps(self, global_steps: int) -> None:
        await super().set_global_steps(global_steps)
        self._gate.versions[self._expected] = global_steps

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


class WorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Takes new weights in vLLM's worker process: an adapter by its number, where veRL's own has one for all."""

    def update_weights_from_ipc(self, adapter: int = 0, **settings: Any) -> None:
        """Called by veRL on every exchange of weights; `adapter`: the policy's number, 0 for whole weights."""
        self._adapter = adapter
        super().update_weights_from_ipc(**settings)

    def _update_weights(
        self, weights: list[tuple[str, Tensor]], peft_config: Mapping[str, Any] | None, base_sync_done: bool
    ) -> None:
        if not self._adapter:
            super()._update_weights(weights, peft_config, base_sync_done)
            return
        from vllm.model_executor.models.utils import WeightsMapper

        WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper  # The name in vLLM 0.25, for veRL 0.9.1.
        name, tensors = str(self._adapter), {"peft_config": peft_config, "lora_tensors": dict(weights)}
        self.add_lora(TensorLoRARequest(name, self._adapter, name, load_inplace=True, **tensors))


class CpuWorkerExtension(WorkerExtension):
    """The same on a CPU. Whole weights come at once, as a checkpoint: that restores the loaders that repacking took."""

    def update_weights_from_ipc(self, adapter: int = 0, use_shm: bool = False, **settings: Any) -> None:
        self.device = torch.device("cpu")
        if adapter:
            super().update_weights_from_ipc(adapter, use_shm=use_shm, **settings)
            return
        received: list[tuple[str, Tensor]] = []

        def take(weights: list[tuple[str, Tensor]], last: bool) -> None:
            # Copied: on a CPU they are views of shared memory, which is closed afterwards.
            received.extend((name, tensor.clone()) for name, tensor in weights)

        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=take)
        self.reload_weights(weights_iterator=iter(received))
