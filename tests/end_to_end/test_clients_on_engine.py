"""Real clients on the whole stack: gateway, store and the torch engine, with a policy that babbles."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import agents
import anthropic
import numpy as np
import openai
import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from transformers import AddedToken, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from agl_core.config.models import SamplingSection
from agl_core.protocols import EngineContext, PolicySpec
from agl_core.types import AttemptKey, Call, FinishReason
from agl_server.store.sqlite import SqliteStore
from agl_server.testing import Stack, running_stack
from agl_torch.plugin import TorchEngine, TorchOptions

CHAT_TEMPLATE = Path(__file__).parents[2] / "examples" / "chatml.jinja"
CONTEXT = 2048
MAX_TOKENS = 32
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_MARKS = ("<tool_call>", "</tool_call>")
NO_ARGUMENTS = " {}}\n" + TOOL_MARKS[1]
"""How a tool call without arguments goes on after the key of the arguments."""
TEXTS = (
    "Hello, how are you? What is the weather like in San Francisco today?",
    '{"name": "magic_function", "arguments":' + NO_ARGUMENTS,
    "user\nassistant\nsystem\nGrüße, 世界! The answer is 12 + 345 = 357.",
)


@dataclass(frozen=True)
class EngineStack:
    """The running stack; every method may be called from any thread but the stack's own."""

    stack: Stack
    tokenizer: PreTrainedTokenizerBase
    portal: BlockingPortal

    def lease(self) -> AttemptKey:
        """The attempt of a new rollout. All have one task: the n-th call of each has the same sampling seed."""
        return self.portal.call(self.stack.lease)

    def url(self, key: AttemptKey) -> str:
        return self.stack.url(key)

    def client(self, key: AttemptKey) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url(key), api_key=self.stack.key(key), max_retries=0)

    def calls(self, key: AttemptKey) -> list[Call]:
        return self.portal.call(self.stack.calls, key)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineStack]:
    """A policy, served from a loop in a thread; the engine is a process of its own."""
    folder = tmp_path_factory.mktemp("engine-stack")
    tokenizer = make_policy(folder / "policy")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(_serving(folder)) as stack:
        yield EngineStack(stack, tokenizer, portal)


@contextlib.asynccontextmanager
async def _serving(folder: Path) -> AsyncIterator[Stack]:
    policies = {"default": PolicySpec(str(folder / "policy"))}
    context = EngineContext(folder, 0, policies, deterministic=False, plugin_files=(), api_key="the-engine's-key")
    engine = TorchEngine(TorchOptions(threads=1, cache_mib=32), context)
    try:
        upstream = await engine.start()
        async with (
            SqliteStore(folder / "store.sqlite") as store,
            running_stack(
                store=store, upstream=upstream, sampling=SamplingSection(max_tokens=MAX_TOKENS), seed=0, timeout=300
            ) as stack,
        ):
            yield stack
    finally:
        await engine.stop()


def make_policy(folder: Path) -> PreTrainedTokenizerBase:
    """Write a tiny Qwen2 with random weights and a few habits, and return its tokenizer.

    It babbles, bytes that are no characters among it, but now and then a full stop comes, and with it the reply ends.
    So no reply is empty, some end by themselves, and some are cut short. A tool call that was begun for it, up to the
    arguments, it finishes without any.
    """
    tokenizer = _make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
        _give_habits(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


@torch.no_grad()
def _give_habits(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set input and output weights so that some tokens follow some others, and nothing else, almost surely."""
    read, write = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    constant = 0  # a hidden dimension that is alike for every token: output weights of it are biases
    read.normal_()
    read[:, constant] = 4
    write[:, constant] = 0
    end = tokenizer.eos_token_id
    (full_stop,) = tokenizer.encode(".", add_special_tokens=False)
    no_arguments = tokenizer.encode('":' + NO_ARGUMENTS, add_special_tokens=False)
    assert len(set(no_arguments)) == len(no_arguments), "a habit is what follows one token"
    write[full_stop] = 0
    write[full_stop, constant] = 0.85  # about every twentieth token
    followers = [*tokenizer.all_special_ids, *no_arguments[1:]]
    write[followers] = 0
    for token, follower in ((full_stop, end), *pairwise([*no_arguments, end])):
        write[follower] += read[token]
    write[followers, constant] = -7


def _make_tokenizer() -> PreTrainedTokenizerBase:
    """Qwen2's own tokenizer with a vocabulary of every byte and some pieces of `TEXTS`."""
    stock = Qwen2Tokenizer(eos_token=TURN_END, pad_token=END_OF_TEXT, model_max_length=CONTEXT)
    tokenizer: PreTrainedTokenizerBase = stock.train_new_from_iterator(
        TEXTS * 3, 340, new_special_tokens=[TURN_START, TURN_END], show_progress=False
    )  # type: ignore[no-untyped-call]
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in TOOL_MARKS])
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    return tokenizer


WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.mark.parametrize("ending", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_echoed_reply_keeps_its_ids(stack: EngineStack, ending: FinishReason) -> None:
    key = stack.lease()
    create = stack.client(key).chat.completions.create
    first = create(model="default", messages=[user("Hello, how are you?")], n=16, max_tokens=8)
    replies = [choice for choice in first.choices if choice.finish_reason == ending.value]
    # Bytes that are no character come back to the agent as one that is: tokenised again, they would be other tokens.
    reply = next(reply for reply in replies if "\N{REPLACEMENT CHARACTER}" in (reply.message.content or ""))
    create(
        model="default",
        messages=[
            user("Hello, how are you?"),
            {"role": "assistant", "content": reply.message.content},
            user("What is the weather like today?"),
        ],
    )
    once, again = stack.calls(key)
    assert_spliced(stack, once, again, choice=reply.index)


def assert_spliced(stack: EngineStack, first: Call, second: Call, choice: int = 0) -> None:
    """The second prompt goes on, token by token, from the first prompt and its reply, and most of it was cached."""
    reply = first.choices[choice]
    assert reply.response_ids is not None
    assert first.prompt_ids is not None
    assert second.prompt_ids is not None
    before = np.concatenate([first.prompt_ids, reply.response_ids])
    assert np.array_equal(second.prompt_ids[: len(before)], before)
    ended = reply.finish_reason is not FinishReason.LENGTH
    assert (reply.response_ids[-1] == stack.tokenizer.eos_token_id) == ended
    rest = str(stack.tokenizer.decode(second.prompt_ids[len(before) :]))
    assert rest.startswith("\n<|im_start|>user\n" if ended else "<|im_end|>\n<|im_start|>user\n")
    assert not second.prefix_broken
    assert second.reused >= 0.9 * len(before)


def sum_of(chunks: Any) -> AIMessageChunk:
    total: AIMessageChunk = functools.reduce(operator.add, chunks)
    return total


def user(text: str) -> Any:
    return {"role": "user", "content": text}


PARAMETERS: Any = {"type": "object", "properties": {}}
ASKED: dict[str, Any] = {"model": "default"}
TURNS = 4


def converse_by_langchain(stack: EngineStack, key: AttemptKey, streamed: bool) -> None:
    model = ChatOpenAI(
        model="default",
        base_url=stack.url(key),
        api_key=SecretStr(stack.stack.key(key)),
        stream_usage=True,
        max_retries=0,
    )
    free, forced = model.bind_tools([WEATHER]), model.bind_tools([WEATHER], tool_choice="get_weather")
    messages: list[BaseMessage] = [HumanMessage("Hello, how are you?")]
    for turn in range(TURNS):
        chat: Any = forced if turn % 2 else free
        reply: AIMessage = sum_of(chat.stream(messages)) if streamed else chat.invoke(messages)
        assert reply.usage_metadata
        assert reply.usage_metadata["input_token_details"]["cache_read"] > 0 or not turn
        new = [ToolMessage("22 °C", tool_call_id=call["id"]) for call in reply.tool_calls]
        messages += [reply, *(new or [HumanMessage(f"and {turn}?")])]


def converse_by_responses(stack: EngineStack, key: AttemptKey, streamed: bool, continued: bool = False) -> None:
    client = stack.client(key)
    tools: Any = [{"type": "function", "name": "magic_function", "parameters": PARAMETERS}]
    items: list[Any] = [{"role": "user", "content": "Hello"}]
    previous: dict[str, Any] = {}
    for turn in range(TURNS):
        choice: Any = {"tool_choice": "required"} if turn % 2 else {}
        request = {**ASKED, **previous, **choice, "input": items, "instructions": "Be kind.", "tools": tools}
        if streamed:
            with client.responses.stream(**request) as stream:
                events = list(stream)
            response: Any = next(e.response for e in reversed(events) if hasattr(e, "response"))
        else:
            response = client.responses.create(**request)
        new = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "22 °C"}
            for item in response.output
            if item.type == "function_call"
        ] or [{"role": "user", "content": f"and {turn}?"}]
        items = new if continued else [*items, *response.output, *new]
        previous = {"previous_response_id": response.id} if continued else {}


def converse_by_messages(stack: EngineStack, key: AttemptKey, streamed: bool) -> None:
    client = anthropic.Anthropic(
        base_url=stack.url(key).removesuffix("/v1"), api_key=stack.stack.key(key), max_retries=0
    )
    tools: Any = [{"name": "magic_function", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    for turn in range(TURNS):
        choice: Any = {"tool_choice": {"type": "any"}} if turn % 2 else {}
        request = {**ASKED, **choice, "max_tokens": 32, "system": "Be kind.", "messages": messages, "tools": tools}
        if streamed:
            with client.messages.stream(**request) as stream:
                message: Any = stream.get_final_message()
        else:
            message = client.messages.create(**request)
        new: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "22 °C"}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": new or f"{turn}?"}]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "converse",
    [
        converse_by_langchain,
        converse_by_responses,
        functools.partial(converse_by_responses, continued=True),
        converse_by_messages,
    ],
    ids=["langchain", "responses", "continued", "messages"],
)
def test_a_conversation_keeps_its_ids(stack: EngineStack, converse: Callable[..., None], streamed: bool) -> None:
    """Every other turn is a forced tool call, whose forced tokens are recorded as such."""
    key = stack.lease()
    converse(stack, key, streamed)
    calls = stack.calls(key)
    assert len(calls) == TURNS
    for earlier, later in pairwise(calls):
        assert_spliced(stack, earlier, later)
    for call in calls[1::2]:
        (choice,) = call.choices
        assert (choice.message["tool_calls"][0]["function"]["arguments"], choice.parse_error) == ("{}", None)
        assert choice.response_ids is not None
        assert choice.mask is not None
        texts = [str(stack.tokenizer.decode(choice.response_ids[mask])) for mask in (~choice.mask, choice.mask)]
        assert texts[0].startswith('<tool_call>\n{"name": "')
        assert texts[1] == " {}}\n</tool_call><|im_end|>"


@agents.function_tool
def magic_function() -> str:
    """The weather."""
    return "22 °C"


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_an_agent_with_the_settings_that_its_sdk_has_by_default(stack: EngineStack, api: str) -> None:
    """The Agents SDK asks for the effort and verbosity of the vendor's own models, whatever the model."""
    key = stack.lease()
    kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[api]
    agent = agents.Agent(name="helper", instructions="Be kind.", tools=[magic_function])

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=stack.url(key), api_key=stack.stack.key(key), max_retries=0) as client:
            agent.model = kind("default", client)
            return await agents.Runner.run(agent, "Hello", run_config=agents.RunConfig(tracing_disabled=True))

    assert asyncio.run(run()).final_output
    (call,) = stack.calls(key)
    assert {"reasoning_effort", "verbosity"} <= call.request.keys()
    assert call.prompt_ids is not None
