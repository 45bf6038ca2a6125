"""The chat layer in front of a real vLLM on a CPU: token ids in and out, over HTTP, without veRL and Ray."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from agl_algorithms.policy_gradient import Teacher
from agl_chat.api import ModelServer, create_app
from agl_chat.backends import Request, SampledToken, VllmBackend
from agl_chat.conversation import ChatText, load_text
from agl_chat.proxy import make_proxy
from agl_core.apis.errors import ApiError
from agl_core.apis.streamed import StreamedCompletion
from agl_core.config.sections import OptimizerSection
from agl_core.errors import EngineError
from agl_core.learning.transitions import grammar_of
from agl_core.protocols import PolicySpec
from agl_core.testing import engines
from agl_core.types import PrefixBreak
from agl_torch.grammars import unpack
from agl_torch.loading import LoadedModel, load_model
from agl_torch.requests import Job, Row, distort
from agl_torch.teachers import ServedTeacher
from agl_torch.trainer import PolicyTrainer
from agl_verl.environment import variables

POLICY = Path(__file__).resolve().parents[3] / "examples" / "calc" / "policy"
CONTEXT = 512
USER = {"role": "user", "content": "What is 12 plus 3?"}
CALCULATOR = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {}}}},
}
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Served:
    """A vLLM server, and what it serves as the tests know it."""

    url: str
    text: ChatText
    model: LoadedModel

    def backend(self) -> VllmBackend:
        return VllmBackend(httpx.AsyncClient(base_url=self.url, timeout=300, trust_env=False), self.text.eos_ids)

    def chat(self) -> httpx.AsyncClient:
        """A client of the chat layer before it."""
        app = create_app({"m": ModelServer("m", self.text, CONTEXT)}, self.backend(), api_key="key")
        headers = {"authorization": "Bearer key", "x-agl-rollout": "r/0"}
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://chat", headers=headers)

    def distributions(self, reply: dict[str, Any], temperature: float, choice: int = 0) -> torch.Tensor:
        """[T, V] the log-probabilities by one forward pass of the torch engine's model."""
        return (self.logits(reply, choice) / temperature).log_softmax(-1)

    def logits(self, reply: dict[str, Any], choice: int = 0) -> torch.Tensor:
        """[T, V]"""
        prompt, ids = reply["prompt_token_ids"], reply["choices"][choice]["token_ids"]
        with torch.no_grad():
            return self.model.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()

    def logprobs(self, reply: dict[str, Any], temperature: float = 1.0, choice: int = 0) -> list[float]:
        """[T] of the sampled tokens."""
        ids = torch.tensor(reply["choices"][choice]["token_ids"])[:, None]
        return self.distributions(reply, temperature, choice).gather(1, ids)[:, 0].tolist()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(POLICY), "--host", "127.0.0.1"),
        *("--served-model-name", "m", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(CONTEXT), "--logprobs-mode", "processed_logprobs"),
        *("--enable-scale-out", "--enable-prompt-tokens-details"),
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
    ]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("w") as output:
        settings = variables(cpu=True, api_key="", deterministic=False, cache_mib=1024)
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **settings})
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
                break
            except httpx.TransportError:
                assert server.poll() is None, log.read_text()[-4000:]
                time.sleep(1)
        model = load_model(PolicySpec(model=str(POLICY), dtype="float32"), torch.device("cpu"), 0)
        yield Served(url, load_text(str(POLICY)), model)
    finally:
        server.terminate()
        server.wait(60)


async def ask(client: httpx.AsyncClient, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": messages, "logprobs": True, "return_token_ids": True, "max_tokens": 24, **fields}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def reported(reply: dict[str, Any], choice: int = 0) -> list[float]:
    return [entry["logprob"] for entry in reply["choices"][choice]["logprobs"]["content"]]


async def test_prompts_of_five_turns_extend_the_recorded_ids(served: Served) -> None:
    messages: list[dict[str, Any]] = [USER]
    before: list[int] = []
    async with served.chat() as client:
        for turn in range(5):
            fields = {"tools": [CALCULATOR], "temperature": 1.3, "seed": turn}
            reply = await ask(client, messages, **fields, tool_choice="required" if turn % 2 else "auto")
            (choice,), prompt = reply["choices"], reply["prompt_token_ids"]
            assert prompt[: len(before)] == before
            assert not reply["agl"]["prefix_broken"]
            masked = sum(not sampled for sampled in reply["agl"]["choices"][0]["mask"] or ())
            assert bool(masked) == bool(turn % 2)
            assert reported(reply)[masked:] == pytest.approx(served.logprobs(reply, 1.3)[masked:], abs=1e-4)
            before = [*prompt, *choice["token_ids"]]
            messages = [*messages, choice["message"]]
            calls = choice["message"].get("tool_calls", [])
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "15"} for call in calls]
            messages += results or [{"role": "user", "content": f"And {turn} plus 4?"}]
        edited = [*messages[:1], {"role": "assistant", "content": "It is 15."}, *messages[2:]]
        broken = await ask(client, edited, tools=[CALCULATOR])
    assert broken["agl"]["prefix_broken"] == PrefixBreak.MOVED


async def test_it_stands_before_a_server_that_runs_already(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=300, trust_env=False) as client:
        app = await make_proxy(client, POLICY, "key")
        headers = {"authorization": "Bearer key", "x-agl-rollout": "r/0"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://c", headers=headers) as chat:
            reply = await ask(chat, [USER], temperature=1.3)
            messages = [USER, reply["choices"][0]["message"], USER]
            following = await ask(chat, messages)
    recorded = [*reply["prompt_token_ids"], *reply["choices"][0]["token_ids"]]
    assert following["prompt_token_ids"][: len(recorded)] == recorded
    assert reported(reply) == pytest.approx(served.logprobs(reply, 1.3), abs=1e-4)


async def test_a_first_prompt_is_what_vllm_renders_itself(served: Served) -> None:
    async with served.chat() as client, httpx.AsyncClient(base_url=served.url, trust_env=False) as vllm:
        for tools in ([], [CALCULATOR]):
            messages = [{"role": "system", "content": "Be brief."}, USER]
            reply = await ask(client, messages, **({"tools": tools} if tools else {}))
            rendered = await vllm.post("/tokenize", json={"model": "m", "messages": messages, "tools": tools or None})
            assert reply["prompt_token_ids"] == rendered.json()["tokens"]


async def test_choices_seeds_and_the_likeliest_tokens(served: Served) -> None:
    fields = {"temperature": 0.8, "seed": 7, "n": 3, "top_logprobs": 4, "max_tokens": 6}
    async with served.chat() as client:
        first, again = await ask(client, [USER], **fields), await ask(client, [USER], **fields)
        other = await ask(client, [USER], **{**fields, "seed": 8})
        greedy = await ask(client, [USER], temperature=0, max_tokens=6)
    ids = [choice["token_ids"] for choice in first["choices"]]
    assert ids == [choice["token_ids"] for choice in again["choices"]]
    assert ids != [choice["token_ids"] for choice in other["choices"]]
    for index, choice in enumerate(first["choices"]):
        likeliest = served.distributions(first, 0.8, index).topk(4, -1)
        for entry, values in zip(choice["logprobs"]["content"], likeliest.values.tolist(), strict=True):
            assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(values, abs=1e-3)
    assert reported(greedy) == pytest.approx(served.logprobs(greedy), abs=1e-4)
    assert served.distributions(greedy, 1.0).argmax(-1).tolist() == greedy["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.5, "frequency_penalty": -1.0},
        {"repetition_penalty": 1.4, "logit_bias": {"40": 3.0, "41": -2.0}, "min_p": 0.02},
        {"top_k": 3, "frequency_penalty": 0.5, "repetition_penalty": 0.8},
        {"allowed_token_ids": [*range(30, 60)], "min_p": 0.1, "top_k": 9},
    ],
)
async def test_a_distorted_distribution_is_the_torch_engines(served: Served, fields: dict[str, Any]) -> None:
    """vLLM reports log-probabilities of what it draws from; agl's engine those of the model's own distribution."""
    async with served.chat() as client:
        reply = await ask(client, [USER], **fields, temperature=0.7, top_logprobs=19, max_tokens=12)
    prompt, (choice,) = np.array(reply["prompt_token_ids"], np.int32), reply["choices"]
    request = Request("r", prompt, 12, temperature=0.7, distortions=fields)
    own = served.logits(reply)
    for position, entry in enumerate(choice["logprobs"]["content"]):
        row = Row(Job(request), 0, 12, [SampledToken(0, token, 0.0) for token in choice["token_ids"][:position]])
        drawn = (distort(own[position], row) / 0.7).log_softmax(-1)
        assert entry["logprob"] == pytest.approx(drawn[choice["token_ids"][position]].item(), abs=1e-3)
        expected = [value for value in drawn.topk(19).values.tolist() if value > -np.inf]
        shown = [top["logprob"] for top in entry["top_logprobs"] if top["logprob"] > -1000]
        assert shown == pytest.approx(expected, abs=1e-3)


async def test_a_reply_has_the_form_that_is_asked_for(served: Served) -> None:
    """Its log-probabilities are those over the tokens that the form allows, as in agl's own engine."""
    schema = {"type": "object", "properties": {"sum": {"enum": [15, 16]}}, "required": ["sum"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "Sum", "schema": schema}}
    choices = {"choice": ["15", "16", "42"]}
    async with served.chat() as client:
        written = await ask(client, [USER], response_format=wanted)
        reply = await ask(client, [USER], structured_outputs=choices, temperature=0.9)
        both = {"model": "m", "messages": [USER], "response_format": wanted, "tools": [CALCULATOR]}
        refused = await client.post("/v1/chat/completions", json=both)
    assert json.loads(written["choices"][0]["message"]["content"])["sum"] in (15, 16)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
    (choice,), grammars = reply["choices"], served.model.grammars
    assert choice["message"]["content"] in choices["choice"]
    prompt, ids = (np.array(ids, np.int32) for ids in (reply["prompt_token_ids"], choice["token_ids"]))
    masks = grammars.masks(grammar_of({"structured_outputs": choices}), prompt, ids)
    allowed = unpack(torch.from_numpy(masks), served.model.vocabulary)
    drawn = (served.logits(reply).masked_fill(~allowed, -torch.inf) / 0.9).log_softmax(-1)
    expected = drawn.gather(1, torch.from_numpy(ids).long()[:, None])[:, 0]
    assert reported(reply) == pytest.approx(expected.tolist(), abs=1e-3)
    assert expected.sum() > sum(served.logprobs(reply, 0.9)) + 1


async def test_a_stop_string_ends_the_text_and_the_ids_are_those_sampled(served: Served) -> None:
    async with served.chat() as client:
        whole = (await ask(client, [USER], temperature=0))["choices"][0]
        stop = whole["message"]["content"][3:6]
        cut = (await ask(client, [USER], temperature=0, stop=[stop]))["choices"][0]
        limited = (await ask(client, [USER], temperature=0, max_tokens=2))["choices"][0]
    assert cut["message"]["content"] == whole["message"]["content"].split(stop)[0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert stop in served.text.decode(cut["token_ids"])
    assert (limited["finish_reason"], limited["token_ids"]) == ("length", whole["token_ids"][:2])
    assert whole["token_ids"][-1] in served.text.eos_ids


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_adds_up_to_the_whole_reply(served: Served, n: int) -> None:
    fields = {
        "tools": [CALCULATOR],
        "temperature": 1.1,
        "seed": 5,
        "n": n,
        "top_logprobs": 2,
        "tool_choice": "required",
    }
    body = {"model": "m", "messages": [USER], "logprobs": True, "return_token_ids": True, "max_tokens": 24, **fields}
    body["stream"] = True
    completion, sizes = StreamedCompletion("reply"), list[int]()
    async with served.chat() as client:
        whole = await ask(client, [USER], **fields)
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    sizes += [len(delta.token_ids) for delta in completion.add(json.loads(line[6:]))]
    added = json.loads(completion.whole())
    for one, other in zip(added["choices"], whole["choices"], strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert one["message"]["content"] == other["message"]["content"]
        assert one["message"].get("tool_calls") == other["message"].get("tool_calls")
        assert one["finish_reason"] == other["finish_reason"]
    assert [reported(added, i) for i in range(n)] == [pytest.approx(reported(whole, i), abs=1e-5) for i in range(n)]
    assert added["prompt_token_ids"] == whole["prompt_token_ids"]
    assert added["agl"]["choices"] == whole["agl"]["choices"]
    assert n > 1 or sum(map(bool, sizes)) > 8, "token by token"


async def test_the_context_is_filled_to_its_end(served: Served) -> None:
    long = {"role": "user", "content": "12 plus 3 " * 60}
    async with served.chat() as client:
        reply = await ask(client, [long], temperature=1.5, max_tokens=9999)
        assert reply["usage"]["total_tokens"] <= CONTEXT
        refused = await client.post("/v1/chat/completions", json={"model": "m", "messages": [long] * 20})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_vllms_refusals_come_in_its_own_words(served: Served) -> None:
    prompt = np.array([5, 6, 7], np.int32)
    with pytest.raises(ApiError, match="nobody"):
        await served.backend().generate(Request("a", prompt, 4, model="nobody"))
    with pytest.raises(ApiError, match=r"(?i)out of vocabulary|vocab"):
        await served.backend().generate(Request("b", np.array([10**6], np.int32), 4, model="m"))


async def test_a_teacher_that_vllm_serves_says_what_its_weights_say_here(served: Served) -> None:
    """Of random tokens, the second call of a rollout continuing the first."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(20):
        tokens = random.integers(3, 400, 40).tolist()
        rows += [engines.Row(tokens[:end], tokens[end : end + 9], [-1.0] * 9, 0.0) for end in (12, 28)]
    batch = replace(engines.batch_of(rows), rollout_N=np.arange(40) // 2, turn_N=np.arange(40) % 2)
    teacher = ServedTeacher(Teacher(f"{served.url}/v1", "m"), served.model.tokenizer)
    here = PolicyTrainer(served.model, OptimizerSection(), tokens_per_micro_batch=1000).logprobs(batch)
    np.testing.assert_allclose(teacher.logprobs(batch, np.arange(40)), here.logprobs_R, atol=1e-3)
    with pytest.raises(EngineError, match=r"status 404\): The model `nobody` does not exist"):
        ServedTeacher(Teacher(f"{served.url}/v1", "nobody"), served.model.tokenizer)
