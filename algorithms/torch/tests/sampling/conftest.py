"""Tiny models of two architectures, tokenizers with two chat templates, and ways to drive a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agl_core.types import FinishReason
from agl_torch.model_server import ModelServer, parse_request
from agl_torch.models import attention
from agl_torch.sampling import Generated, Request, Response, Sampler

CHATML = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call them as <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or
   (message.role == 'assistant' and not message.tool_calls) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{%- if message.content %}{{ '\n' + message.content }}{% endif %}
{%- for call in message.tool_calls %}{{ '\n<tool_call>' }}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}<|start_header_id|>assistant<|end_header_id|>

{% set call = message.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if loop.index0 == 0 and tools %}Respond with {"name": NAME, "parameters": OBJECT}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{{ message.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

CORPUS = [
    'What is 12 plus 30? The answer is 42. {"name": "calculator", "arguments": {"expression": "12+30"}}',
    "You are a math agent. Use the calculator. hello there, how many apples are there in all?",
]


def make_tokenizer(special: Sequence[str], template: str, eos: str, bos: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, bos_token=bos, pad_token=special[0], chat_template=template
    )


@dataclass(frozen=True)
class Loaded:
    """What `load_model` gives, made by hand."""

    model: Any
    tokenizer: Any
    eos_ids: frozenset[int]
    context_length: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def token_bytes(self) -> int:
        """What the cache needs for one token, in float32."""
        config = self.model.config
        return int(config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * 4)

    def with_eos(self, *ids: int) -> Loaded:
        return replace(self, eos_ids=frozenset(ids))


def _weights(model: Any) -> Any:
    """Random weights large enough that likely and unlikely tokens differ much."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.12)
    attention.use(model)
    return model.eval()


@pytest.fixture(scope="session")
def qwen() -> Loaded:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    tokenizer = make_tokenizer(special, CHATML, "<|im_end|>")
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    eos = frozenset(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    return Loaded(_weights(Qwen2ForCausalLM(config)), tokenizer, eos, 512)


@pytest.fixture(scope="session")
def llama() -> Loaded:
    special = ["<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
    tokenizer = make_tokenizer(special, LLAMA, "<|eot_id|>", "<|begin|>")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    eos = frozenset(tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>"]))
    return Loaded(_weights(LlamaForCausalLM(config)), tokenizer, eos, 512)


@pytest.fixture(params=["qwen", "llama"])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    chosen: Loaded = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def random_ids(loaded: Loaded, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(8, len(loaded.tokenizer), length).astype(np.int32)


def drive(sampler: Sampler, requests: Sequence[Request] = ()) -> dict[str, Generated]:
    """Submit, run until idle, and return what came out by request id."""
    for request in requests:
        sampler.submit(request)
    done: dict[str, Generated] = {}
    while not sampler.idle:
        done.update((generated.request.id, generated) for generated in sampler.step())
    return done


@torch.inference_mode()
def recomputed(loaded: Loaded, generated: Generated, choice: int = 0) -> np.ndarray:
    """The log-probabilities of a response by one plain forward pass over prompt and response."""
    request, response = generated.request, generated.responses[choice]
    ids = torch.tensor(np.concatenate([request.prompt_ids, response.ids]), dtype=torch.long)
    logits = loaded.model(input_ids=ids[None]).logits[0, len(request.prompt_ids) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (request.temperature or 1.0), -1)
    picked: np.ndarray = logprobs.gather(1, ids[len(request.prompt_ids) :, None])[:, 0].numpy()
    return picked


class ScriptedChat:
    """A served model whose responses the test writes: chat in, chat out, no weights."""

    def __init__(self, loaded: Loaded) -> None:
        self.served, self.loaded = ModelServer("m", loaded), loaded

    def ask(self, messages: list[dict[str, Any]], *replies: str | Sequence[int], **fields: Any) -> dict[str, Any]:
        """Answer by `replies`: texts (the end token is added) or token ids; they follow what is forced."""
        session = fields.pop("session", "r/0")
        body = {"model": "m", "messages": messages, "return_token_ids": True, "n": len(replies), **fields}
        exchange = self.served.begin(parse_request(body), session)
        responses = []
        for reply in replies:
            sampled = [*self.encode(reply), self.loaded.tokenizer.eos_token_id] if isinstance(reply, str) else reply
            forced = exchange.request.forced_ids
            ids = [*forced, *sampled]
            mask = np.arange(len(ids)) >= len(forced) if forced else None
            ended = ids[-1] in self.loaded.eos_ids
            reason = FinishReason.STOP if ended else FinishReason.LENGTH
            responses.append(Response(np.array(ids, np.int32), np.zeros(len(ids), np.float32), mask, reason))
        return self.served.finish(exchange, Generated(exchange.request, tuple(responses), 3, 5, 7))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


CALCULATOR = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {}}}},
}
