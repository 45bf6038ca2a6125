"""Real clients on the whole stack: gateway, store and the torch engine, with a policy that babbles.

Of LangChain's own integration suite, the tests of the protocol pass; those of the model's wit fail by an assertion
about what it said. Not supported, by the suite's properties: images, PDFs and audio (text models), Anthropic's content
blocks, recorded cassettes (`test_stream_time` needs them), and structured output and JSON mode, for this engine
cannot enforce a schema: `test_refusals_are_of_openais_shape` says how that ends.
"""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import agents
import anthropic
import numpy as np
import openai
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from agl_core.types import AttemptKey, Call, Choice, FinishReason

from .engine_stack import CONTEXT, EngineStack, engine_stack

needs_wit = pytest.mark.xfail(
    reason="needs a model that can follow instructions: this one calls no tool by itself, and gives no arguments",
    raises=AssertionError,
    strict=True,
)
in_both_versions = pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)

WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CLOCK: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
JOKE = {
    "title": "Joke",
    "description": "A joke.",
    "type": "object",
    "properties": {"setup": {"type": "string"}},
    "required": ["setup"],
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineStack]:
    with engine_stack(tmp_path_factory.mktemp("engine-stack")) as running:
        yield running


class TestChatOpenAIOnEngine(ChatModelIntegrationTests):
    params: dict[str, Any]

    @pytest.fixture(autouse=True)
    def _lease(self, stack: EngineStack) -> None:
        self.params = chat_openai_params(stack)

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return self.params

    @property
    def model_override_value(self) -> str:
        return "gpt-4o"

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatOpenAI(**self.params)
        model.invoke("What is the weather like?")
        chunks = list(model.stream("What is the weather like?"))
        return sum_of(chunks) if stream else model.invoke("What is the weather like?")

    @needs_wit
    @in_both_versions
    def test_tool_calling(self, model: BaseChatModel) -> None:
        super().test_tool_calling(model)

    @needs_wit
    async def test_tool_calling_async(self, model: BaseChatModel) -> None:
        await super().test_tool_calling_async(model)

    @needs_wit
    def test_bind_runnables_as_tools(self, model: BaseChatModel) -> None:
        super().test_bind_runnables_as_tools(model)

    @needs_wit
    def test_tool_choice(self, model: BaseChatModel) -> None:
        super().test_tool_choice(model)

    @needs_wit
    @in_both_versions
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @needs_wit
    def test_unicode_tool_call_integration(self, model: BaseChatModel) -> None:  # type: ignore[override]
        super().test_unicode_tool_call_integration(model)


def test_refusals_are_of_openais_shape_and_record_nothing(stack: EngineStack) -> None:
    key = stack.lease()
    create = stack.client(key).chat.completions.create
    schema: Any = {"type": "json_schema", "json_schema": {"name": "joke", "schema": JOKE}}
    with pytest.raises(openai.BadRequestError, match="cannot be enforced") as refused:
        create(model="default", messages=[user("A joke.")], response_format=schema)
    assert (refused.value.param, refused.value.code) == ("response_format", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match=f"context is {CONTEXT} tokens") as too_long:
        create(model="default", messages=[user("What is 1 + 1? " * 300)])
    assert (too_long.value.param, too_long.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError, match="Did you mean 'get_weather'") as unknown:
        create(model="default", messages=[user("?")], tools=[WEATHER], tool_choice=named("get_wether"))
    assert unknown.value.param == "tool_choice"
    assert stack.calls(key) == []


def test_a_stream_is_the_recorded_reply(stack: EngineStack) -> None:
    key = stack.lease()
    chunks = list(
        stack.client(key).chat.completions.create(
            model="default",
            messages=[user("Hello")],
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
        )
    )
    (call,) = stack.calls(key)
    (choice,) = call.choices
    pieces = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(piece.delta.content or "" for piece in pieces) == choice.message["content"] != ""
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [choice.finish_reason.value]
    logprobs = [entry.logprob for piece in pieces if piece.logprobs for entry in piece.logprobs.content or ()]
    assert choice.logprobs is not None
    assert np.array_equal(np.array(logprobs, np.float32), choice.logprobs)
    assert call.prompt_ids is not None
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(call.prompt_ids), len(choice.logprobs))


def test_choices_are_samples_of_one_prompt(stack: EngineStack) -> None:
    key = stack.lease()
    completion = stack.client(key).chat.completions.create(
        model="default", messages=[user("Hello")], n=2, logprobs=True, temperature=0
    )
    (call,) = stack.calls(key)
    assert completion.choices[0].message.content != completion.choices[1].message.content
    assert call.prompt_ids is not None
    assert stack.tokenizer.decode(call.prompt_ids) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert (call.requested.temperature, call.effective.temperature) == (0, 1)  # training samples, whatever is asked
    for shown, recorded in zip(completion.choices, call.choices, strict=True):
        assert shown.message.content == recorded.message["content"] == text_of(stack, recorded.response_ids)
        assert shown.logprobs is not None
        logprobs = np.array([entry.logprob for entry in shown.logprobs.content or ()], np.float32)
        assert recorded.logprobs is not None
        assert np.array_equal(logprobs, recorded.logprobs)
        assert (logprobs <= 0).all()
        assert logprobs.min() < -1  # of sampling at temperature 1, not at the 0 that was asked for
        assert recorded.mask is None  # all sampled
        assert not shown.model_extra or "token_ids" not in shown.model_extra


def test_forced_tokens_are_recorded_as_forced(stack: EngineStack) -> None:
    key = stack.lease()
    completion = stack.client(key).chat.completions.create(
        model="default", messages=[user("Will it rain?")], tools=[WEATHER], tool_choice=named("get_weather")
    )
    tool_calls: Any = completion.choices[0].message.tool_calls
    (tool_call,) = tool_calls
    assert (tool_call.function.name, tool_call.function.arguments) == ("get_weather", "{}")
    assert completion.choices[0].finish_reason == "tool_calls"
    (choice,) = recorded_choices(stack, key)
    assert choice.parse_error is None
    forced, sampled = forced_and_sampled(stack, choice)
    assert forced == '<tool_call>\n{"name": "get_weather", "arguments":'
    assert sampled == " {}}\n</tool_call><|im_end|>"


@pytest.mark.parametrize("ending", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_echoed_reply_keeps_its_ids(stack: EngineStack, ending: FinishReason) -> None:
    key = stack.lease()
    create = stack.client(key).chat.completions.create
    first = create(model="default", messages=[user("Hello, how are you?")], n=16, max_tokens=8)
    replies = [choice for choice in first.choices if choice.finish_reason == ending.value]
    # Bytes that are no character come back to the agent as one that is: tokenised again, they would be other tokens.
    reply = next(each for each in replies if "\N{REPLACEMENT CHARACTER}" in (each.message.content or ""))
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


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_of_langchain_keeps_its_ids(stack: EngineStack, streams: bool) -> None:
    key = stack.lease()
    model = ChatOpenAI(**chat_openai_params(stack, key))
    forced = model.bind_tools([WEATHER], tool_choice="get_weather")
    free = model.bind_tools([WEATHER])

    def ask(asked: Any) -> AIMessage:
        return sum_of(asked.stream(said)) if streams else asked.invoke(said)

    said: list[BaseMessage] = [HumanMessage("Hello, how are you?")]
    said += [ask(free), HumanMessage("What is the weather like today?")]
    called = ask(forced)
    (tool_call,) = called.tool_calls
    said += [called, ToolMessage("It is sunny.", tool_call_id=tool_call["id"])]
    said += [ask(free), HumanMessage("And in San Francisco?")]
    ask(free)
    calls = stack.calls(key)
    assert len(calls) == 4
    for earlier, later in pairwise(calls):
        assert_spliced(stack, earlier, later)


def assert_spliced(stack: EngineStack, first: Call, second: Call, choice: int = 0) -> None:
    """The second prompt goes on, token by token, from the first prompt and its reply, and most of it was cached."""
    said = first.choices[choice]
    assert said.response_ids is not None
    assert first.prompt_ids is not None
    assert second.prompt_ids is not None
    before = np.concatenate([first.prompt_ids, said.response_ids])
    assert np.array_equal(second.prompt_ids[: len(before)], before)
    ended = said.finish_reason is not FinishReason.LENGTH
    assert (said.response_ids[-1] == stack.tokenizer.eos_token_id) == ended
    rest = str(stack.tokenizer.decode(second.prompt_ids[len(before) :]))
    assert rest.startswith("\n<|im_start|>user\n" if ended else "<|im_end|>\n<|im_start|>user\n")
    assert not second.prefix_broken
    assert second.reused >= 0.9 * len(before)


def chat_openai_params(stack: EngineStack, key: AttemptKey | None = None) -> dict[str, Any]:
    """What `ChatOpenAI` needs to work on an attempt, by default on a new one."""
    key = key or stack.lease()
    return {
        "model": "default",
        "base_url": stack.url(key),
        "api_key": stack.server.keys.of_attempt(key),
        "stream_usage": True,
        "max_retries": 0,
        # LangChain shares one async client between models; here each test has an event loop of its own.
        "http_async_client": openai.DefaultAsyncHttpxClient(),
    }


def sum_of(chunks: Any) -> AIMessageChunk:
    """The message that a stream's chunks make together."""
    total: AIMessageChunk = functools.reduce(operator.add, chunks)
    return total


def recorded_choices(stack: EngineStack, key: AttemptKey) -> tuple[Choice, ...]:
    """The choices of the only call of an attempt."""
    (call,) = stack.calls(key)
    return call.choices


def forced_and_sampled(stack: EngineStack, choice: Choice) -> tuple[str, str]:
    """The text that the engine wrote for the policy, and what the policy itself wrote after it."""
    assert choice.response_ids is not None
    assert choice.mask is not None
    forced = int((~choice.mask).sum())
    assert not choice.mask[:forced].any()
    assert choice.mask[forced:].all()
    ids = choice.response_ids
    return str(stack.tokenizer.decode(ids[:forced])), str(stack.tokenizer.decode(ids[forced:]))


def text_of(stack: EngineStack, ids: Any) -> str:
    return str(stack.tokenizer.decode(ids, skip_special_tokens=True))


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def named(tool: str) -> Any:
    return {"type": "function", "function": {"name": tool}}


PARAMETERS: Any = {"type": "object", "properties": {}}
ASKED: dict[str, Any] = {"model": "default"}


def prefixes_are_exact(stack: EngineStack, key: AttemptKey, turns: int) -> None:
    """Every prompt begins with the prompt and the response before it."""
    calls = stack.calls(key)
    assert len(calls) == turns
    assert any(call.choices[0].message.get("tool_calls") for call in calls)
    for before, after in pairwise(calls):
        assert before.prompt_ids is not None
        assert after.prompt_ids is not None
        assert before.choices[0].response_ids is not None
        so_far = [*before.prompt_ids.tolist(), *before.choices[0].response_ids.tolist()]
        assert after.prompt_ids.tolist()[: len(so_far)] == so_far
        assert not after.prefix_broken


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("continued", [False, True])
def test_responses(stack: EngineStack, streamed: bool, continued: bool) -> None:
    key = stack.lease()
    client = stack.client(key)
    tools: Any = [{"type": "function", "name": "magic_function", "parameters": PARAMETERS}]
    items: list[Any] = [{"role": "user", "content": "Hello"}]
    previous: dict[str, Any] = {}
    for turn in range(6):
        choice: Any = {"tool_choice": "required"} if turn % 2 else {}
        asked = {**ASKED, **previous, **choice, "input": items, "instructions": "Be kind.", "tools": tools}
        if streamed:
            with client.responses.stream(**asked) as stream:
                events = list(stream)
            response: Any = next(e.response for e in reversed(events) if hasattr(e, "response"))
        else:
            response = client.responses.create(**asked)
        new = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "22 °C"}
            for item in response.output
            if item.type == "function_call"
        ] or [{"role": "user", "content": f"and {turn}?"}]
        items = new if continued else [*items, *response.output, *new]
        previous = {"previous_response_id": response.id} if continued else {}
    prefixes_are_exact(stack, key, 6)


@pytest.mark.parametrize("streamed", [False, True])
def test_messages(stack: EngineStack, streamed: bool) -> None:
    key = stack.lease()
    base_url = stack.url(key).removesuffix("/v1")
    client = anthropic.Anthropic(base_url=base_url, api_key=stack.server.keys.of_attempt(key), max_retries=0)
    tools: Any = [{"name": "magic_function", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    for turn in range(6):
        choice: Any = {"tool_choice": {"type": "any"}} if turn % 2 else {}
        asked = {**ASKED, **choice, "max_tokens": 32, "system": "Be kind.", "messages": messages, "tools": tools}
        if streamed:
            with client.messages.stream(**asked) as stream:
                message: Any = stream.get_final_message()
        else:
            message = client.messages.create(**asked)
        new: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "22 °C"}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": new or f"{turn}?"}]
    prefixes_are_exact(stack, key, 6)


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
        async with openai.AsyncOpenAI(
            base_url=stack.url(key), api_key=stack.server.keys.of_attempt(key), max_retries=0
        ) as client:
            agent.model = kind("default", client)
            return await agents.Runner.run(agent, "Hello", run_config=agents.RunConfig(tracing_disabled=True))

    assert asyncio.run(run()).final_output
    (call,) = stack.calls(key)
    assert {"reasoning_effort", "verbosity"} <= call.request.keys()
    assert call.prompt_ids is not None
