"""A service with the Tinker API over HTTP, whose models are bigrams, and which fails as a test's script says.

It speaks with the client 0.15, in JSON, and with the newest, whose passes and replies are protobuf; and it refuses as
Tinker does to load a checkpoint into a model that has worked. Sums are not divided, as Tinker's are not.
"""

from __future__ import annotations

import io
import json
import socket
import tarfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .bigram import Bigrams
from .skyrl_tx import KEY, make_policy

PROTO = "application/x-protobuf"
SECONDS_TO_START = 20.0
Json = dict[str, Any]


class TrainedBigrams(Bigrams):
    """A model, with the requests that it has had; its checkpoints are the service's."""

    def __init__(self, vocabulary: int, saved: Json) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.logits = torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64).requires_grad_()
        self._adam = torch.optim.AdamW([self.logits])
        self.saved = saved
        self.requests = 0

    def passed(self, data: Sequence[tinker.Datum], loss_fn: str, *, backward: bool) -> list[list[float]]:
        """Each row's log-probabilities; the gradient is kept."""
        done = (self.forward_backward if backward else self.forward)(data, loss_fn)
        return [output["logprobs"].data for output in done.result().loss_fn_outputs]


class ScriptedService:
    """The service. A test sets what goes wrong, by route; the rest is answered."""

    def __init__(self, folder: Path) -> None:
        self.policy = folder / "policy"
        """The model's folder, as agl reads it."""
        make_policy(self.policy)
        self.statuses: dict[str, list[int]] = defaultdict(list)
        """The next requests of a route get these statuses."""
        self.waits: Counter[str] = Counter()
        """A request of this route is asked for so many times before it is ready."""
        self.failures: dict[str, list[str]] = defaultdict(list)
        """The next requests of a route are accepted, and fail for these reasons."""
        self.asked: Counter[str] = Counter()
        """The requests of each route."""
        self._vocabulary = json.loads((self.policy / "config.json").read_text())["vocab_size"]
        self._saved: Json = {}
        self._models: dict[str, TrainedBigrams] = {}
        self._created: dict[str, Json] = {}
        self._samplers: dict[str, torch.Tensor] = {"": self._new_model().logits.detach()}
        self._results: dict[str, tuple[str, Json]] = {}
        self._files: dict[str, bytes] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/api/v1/{route:path}", self._answer, methods=["GET", "POST"])])

    def serve(self) -> uvicorn.Server:
        server = uvicorn.Server(uvicorn.Config(self.app(), log_level="warning", access_log=False, lifespan="off"))
        threading.Thread(target=server.run, args=([self._listener],), daemon=True).start()
        until = time.monotonic() + SECONDS_TO_START
        while not server.started:
            assert time.monotonic() < until, "the service does not start"
            time.sleep(0.01)
        return server

    async def _answer(self, request: Request) -> Response:
        route = request.path_params["route"].split("/")[0]
        self.asked[route] += 1
        if route == "files":
            return Response(self._files[request.path_params["route"].split("/", 1)[1]])
        if request.headers.get("x-api-key") != KEY:
            return JSONResponse({"detail": "Invalid API key."}, 401)
        if self.statuses[route]:
            return JSONResponse({"detail": "As the script says."}, self.statuses[route].pop(0))
        content = await request.body()
        as_proto = PROTO in request.headers.get("content-type", "")
        body = _pass_of(content) if as_proto else json.loads(content or b"{}")
        if route == "retrieve_future":
            return self._retrieved(body["request_id"], as_proto=PROTO in request.headers.get("accept", ""))
        if route == "training_runs":
            return self._downloads(request.path_params["route"])
        if route == "samplers":
            return JSONResponse({"sampler_id": request.path_params["route"].split("/")[1], "base_model": "bigrams"})
        if route in _CONSTANT:
            return JSONResponse(_CONSTANT[route])
        if route in ("get_info", "weights_info"):
            model = body["model_id"] if route == "get_info" else body["tinker_path"].split("/")[2]
            return JSONResponse(_info(model, self._created[model]))
        if route == "load_weights" and body.get("seq_id", 1) != 1:  # Tinker's own words.
            return JSONResponse({"detail": f"LoadWeights is not permitted with seq_id {body['seq_id']}"}, 400)
        try:
            return JSONResponse(self._promised(route, body))
        except Exception as error:  # A status that the client does not repeat.
            return JSONResponse({"detail": f"{route}: {error!r}"}, 422)

    def _promised(self, route: str, body: Json) -> Json:
        """Do what is asked for, in the order of the requests, and keep the result until it is asked for."""
        if model := self._models.get(body.get("model_id", "")):
            model.requests += 1
            assert body["seq_id"] == model.requests, f"{route} is request {body['seq_id']}, after {model.requests - 1}"
        done: Callable[[Json], Json] = getattr(self, f"_{route}")
        result = {"error": self.failures[route].pop(0), "category": "user"} if self.failures[route] else done(body)
        if route == "create_sampling_session":
            return result
        request = f"request-{len(self._results)}"
        self._results[request] = (route, result)
        sequences = [f"{request}-{n}" for n in range(body.get("num_samples", 0))]
        return {"request_id": request, "model_id": body.get("model_id"), "sample_sequence_ids": sequences or None}

    def _retrieved(self, request: str, *, as_proto: bool) -> Response:
        route, result = self._results[request]
        if self.waits[route] > 0:
            self.waits[route] -= 1
            waiting = {"type": "try_again", "request_id": request, "queue_state": "paused_capacity"}
            return JSONResponse(waiting)
        if as_proto and "error" not in result:
            return Response(_as_proto(result), media_type=PROTO)
        return JSONResponse(result)

    def _downloads(self, route: str) -> Response:
        """The address of a saved adapter: an archive for the older client, each file for the newest."""
        _, run, _, *checkpoint, wanted = route.split("/")
        weights = self._samplers[f"tinker://{run}/{'/'.join(checkpoint)}"].numpy().tobytes()
        files = {"adapter_config.json": b'{"lora_alpha": 32}', "adapter_model.safetensors": weights}
        place = f"{self.url}/api/v1/files"
        if wanted == "archive":
            self._files["archive"] = archive(files)
            return Response(status_code=302, headers={"location": f"{place}/archive"})
        self._files |= files
        return JSONResponse({"urls": {f"model/{name}": f"{place}/{name}" for name in files}, "expires": time.time()})

    def _new_model(self) -> TrainedBigrams:
        return TrainedBigrams(self._vocabulary, self._saved)

    def _create_model(self, body: Json) -> Json:
        model = f"{body['session_id']}:train:{body['model_seq_id']}"
        self._models[model] = self._new_model()
        self._created[model] = body
        return {"type": "create_model", "model_id": model}

    def _load_weights(self, body: Json) -> Json:
        assert body["optimizer"]
        if "model_id" not in body:
            body |= self._create_model({"lora_config": {}, **body})
        self._models[body["model_id"]].load_state_with_optimizer(body["path"])
        return {"type": "load_weights", "path": body["path"], "model_id": body["model_id"]}

    def _save_weights(self, body: Json) -> Json:
        path = f"tinker://{body['model_id']}/weights/{body['path']}"
        assert path not in self._saved, "Tinker refuses to overwrite a checkpoint"
        self._models[body["model_id"]].save_state(path)
        return {"type": "save_weights", "path": path}

    def _save_weights_for_sampler(self, body: Json) -> Json:
        weights = self._models[body["model_id"]].logits.detach().clone()
        name = body.get("path") or f"session-{len(self._samplers)}"
        if not body.get("path"):
            self._samplers[name] = weights
            return {"type": "save_weights_for_sampler", "sampling_session_id": name}
        path = f"tinker://{body['model_id']}/sampler_weights/{name}"
        self._samplers[path] = weights
        return {"type": "save_weights_for_sampler", "path": path}

    def _save_weights_external(self, body: Json) -> Json:
        path = f"tinker://{body['model_id']}/external_weights/{body['path']}"
        self._samplers[path] = self._models[body["model_id"]].logits.detach().clone()
        return {"type": "save_weights_external", "path": path}

    def _create_sampling_session(self, body: Json) -> Json:
        name = f"session-{len(self._samplers)}"
        self._samplers[name] = self._samplers[body.get("model_path") or ""]
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _forward(self, body: Json) -> Json:
        return self._forward_backward(body | {"forward_only": True, "forward_backward_input": body["forward_input"]})

    def _forward_backward(self, body: Json) -> Json:
        given = body["forward_backward_input"]
        data = [_datum(row) for row in given["data"]]
        model, backward = self._models[body["model_id"]], not body.get("forward_only")
        rows = model.passed(data, given["loss_fn"], backward=backward)
        outputs = [{"logprobs": {"data": row, "dtype": "float32", "shape": [len(row)]}} for row in rows]
        return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": {}}

    def _optim_step(self, body: Json) -> Json:
        self._models[body["model_id"]].optim_step(tinker.AdamParams(**body["adam_params"]))
        return {"metrics": None}

    def _asample(self, body: Json) -> Json:
        logits = self._samplers[body["sampling_session_id"]]
        prompt, settings = _tokens(body["prompt"]["chunks"]), body["sampling_params"]
        sequences = [_sampled(logits, prompt[-1], settings, choice) for choice in range(body["num_samples"])]
        scores = torch.log_softmax(logits, dim=-1)[prompt[:-1], prompt[1:]].tolist()
        return {"type": "sample", "sequences": sequences, "prompt_logprobs": [None, *scores]}


@contextmanager
def scripted_service(folder: Path) -> Iterator[ScriptedService]:
    """It runs while the block does."""
    service = ScriptedService(folder)
    server = service.serve()
    try:
        yield service
    finally:
        server.should_exit = True


def archive(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


_CONSTANT: dict[str, Json] = {
    "client": {},  # Its configuration: all at the client's own defaults.
    "create_session": {"type": "create_session", "session_id": "session"},
    "session_heartbeat": {"type": "session_heartbeat"},
    "get_server_capabilities": {"supported_models": [{"model_name": "bigrams"}]},
    "telemetry": {"status": "accepted"},
    "cancel_future": {},
}


def _info(model: str, created: Json) -> Json:
    rank = created["lora_config"].get("rank")
    about = {"model_id": model, "base_model": "bigrams", "is_lora": True, "lora_rank": rank}
    return about | {"model_data": {"arch": "bigrams", "model_name": "bigrams"}}


def _tokens(chunks: Sequence[Json]) -> list[int]:
    return [token for chunk in chunks for token in chunk["tokens"]]


def _datum(row: Json) -> tinker.Datum:
    inputs = {
        name: tinker.TensorData(data=given["data"], dtype=given["dtype"], shape=given["shape"])
        for name, given in row["loss_fn_inputs"].items()
    }
    tokens = _tokens(row["model_input"]["chunks"])
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def _sampled(logits: torch.Tensor, token: int, settings: Json, choice: int) -> Json:
    """A reply, with log-probabilities at the temperature 1, up to a token of `stop`."""
    generator = torch.Generator().manual_seed(settings.get("seed", 0) + choice)
    stop = settings.get("stop", ())
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < settings["max_tokens"] and (not tokens or token not in stop):
        distribution = torch.log_softmax(logits[token], dim=-1)
        if settings.get("temperature") == 0:
            token = int(distribution.argmax())
        else:
            token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
        tokens.append(token)
        logprobs.append(float(distribution[token]))
    reason = "stop" if token in stop else "length"
    return {"tokens": tokens, "logprobs": logprobs, "stop_reason": reason}


def _pass_of(content: bytes) -> Json:
    """A pass as the newest client writes it, in the words of the older one."""
    from tinker.proto import tinker_public_pb2 as proto

    message = proto.ForwardBackwardRequest.FromString(content)
    numbers = {proto.DTYPE_FLOAT32: "float32", proto.DTYPE_INT64: "int64"}
    data = [
        {
            "model_input": {
                "chunks": [{"tokens": np.frombuffer(c.encoded_text.tokens, np.int32).tolist()} for c in row.model_input]
            },
            "loss_fn_inputs": {
                name: {
                    "data": np.frombuffer(tensor.dense, numbers[tensor.dtype]).tolist(),
                    "dtype": numbers[tensor.dtype],
                    "shape": list(tensor.shape),
                }
                for name, tensor in row.loss_fn_inputs.items()
            },
        }
        for row in message.data
    ]
    given = {"data": data, "loss_fn": message.loss_fn}
    common = {"model_id": message.model_id, "seq_id": message.seq_id, "forward_only": message.forward_only}
    return common | {"forward_backward_input": given}


def _as_proto(result: Json) -> bytes:
    """A pass's log-probabilities or a sampled reply, as the newest client reads them."""
    from tinker.proto import tinker_public_pb2 as proto

    def floats(values: Sequence[float | None]) -> bytes:
        return np.array([np.nan if value is None else value for value in values], np.float32).tobytes()

    if "sequences" in result:
        reasons = {"stop": proto.STOP_REASON_STOP, "length": proto.STOP_REASON_LENGTH}
        sequences = [
            proto.SampledSequence(
                stop_reason=reasons[said["stop_reason"]],
                tokens=np.array(said["tokens"], np.int32).tobytes(),
                logprobs=floats(said["logprobs"]),
            )
            for said in result["sequences"]
        ]
        reply = proto.SampleResponse(sequences=sequences, prompt_logprobs=floats(result["prompt_logprobs"]))
        return reply.SerializeToString()
    rows = [row["logprobs"]["data"] for row in result["loss_fn_outputs"]]
    offsets = np.cumsum([0, *(4 * len(row) for row in rows)]).astype(np.int64).tobytes()
    data = floats([value for row in rows for value in row])
    tensor = proto.BatchedTensor(data=data, offsets=offsets, dtype=proto.DTYPE_FLOAT32)
    record = proto.ArrayRecord(fields={"logprobs": tensor}, num_datums=len(rows))
    output = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record])
    return output.SerializeToString()
