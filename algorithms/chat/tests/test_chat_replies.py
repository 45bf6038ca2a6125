"""From a chat request to a reply, with responses that the test writes."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from dataclasses import replace
from typing import Any

import orjson
import pytest

from agl_chat import api
from agl_chat.api import CHAT_COMPLETIONS, MODELS, PendingReply, create_app
from agl_chat.backends import Generation, Response, SampledToken
from agl_core.apis.errors import ApiError
from agl_core.types import FinishReason

from .conftest import (
    CALCULATOR,
    CALL,
    USER,
    ScriptedBackend,
    ScriptedChat,
    ServedModel,
    assert_continues,
    client_of,
    parsed,
    result,
    with_template,
)

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_plain_reply(chat: ScriptedChat) -> None:
    body = chat.ask([USER], "The answer is 42.")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "The answer is 42.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == [*chat.encode("The answer is 42."), chat.model.tokenizer.eos_token_id]
    prompt = "<|im_start|>user\nWhat is 12 plus 30?<|im_end|>\n<|im_start|>assistant\n"
    assert body["prompt_token_ids"] == chat.encode(prompt)
    assert body["usage"]["prompt_tokens"] == len(body["prompt_token_ids"])
    assert body["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert body["agl"] == {
        "version": 3,
        "prefilled": 5,
        "reused": 7,
        "prefix_broken": None,
        "choices": [{"mask": None, "parse_error": None}],
    }
    assert chat.ask([USER], "The answer is 42.", return_token_ids=False).keys().isdisjoint({"agl", "prompt_token_ids"})


def test_logprobs_name_every_token(chat: ScriptedChat) -> None:
    choice = chat.ask([USER], "hello 42", logprobs=True)["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"])
    assert "".join(entry["token"] for entry in content) == "hello 42<|im_end|>"
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    assert all(entry["top_logprobs"] == [] and entry["logprob"] == 0.0 for entry in content)


def test_tool_calls_are_parsed_where_there_are_tools(chat: ScriptedChat) -> None:
    choice = chat.ask([USER], f"Let me see.\n{CALL}\n{CALL}", tools=[CALCULATOR])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["calculator"] * 2
    assert json.loads(calls[0]["function"]["arguments"]) == {"expression": "12+30"}
    assert len({call["id"] for call in calls}) == 2
    for fields in ({}, {"tools": [CALCULATOR], "tool_choice": "none"}):
        plain = chat.ask([USER], CALL, **fields)["choices"][0]
        assert (plain["message"]["content"], plain["finish_reason"]) == (CALL, "stop")
        assert "tool_calls" not in plain["message"]


def test_half_a_surrogate_pair_in_a_call_breaks_neither_its_reply_nor_a_later_one(chat: ScriptedChat) -> None:
    text = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "\\ud83c"}}\n</tool_call>'
    message = chat.ask([USER], text, tools=[CALCULATOR])["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"expression": "\ufffd"}
    for arguments in (call["function"]["arguments"], '{"expression": "\\ud83c"}'):
        echo = {**message, "tool_calls": [{**call, "function": {"name": "calculator", "arguments": arguments}}]}
        body = chat.ask([USER, echo, USER], "42", tools=[CALCULATOR])
        assert not body["agl"]["prefix_broken"]


def test_call_ids_are_unique_in_a_rollout_and_repeatable(qwen: ServedModel) -> None:
    def ids(session: str, seed: int) -> list[str]:
        chat = ScriptedChat(qwen)
        conversations = [[USER] * turn for turn in (1, 2, 3)]
        bodies = [chat.ask(talk, CALL, CALL, tools=[CALCULATOR], session=session, seed=seed) for talk in conversations]
        return [c["message"]["tool_calls"][0]["id"] for body in bodies for c in body["choices"]]

    assert len(set(ids("r/0", 1))) == 6
    assert ids("r/0", 1) == ids("r/0", 1)
    assert not set(ids("r/0", 1)) & set(ids("r/1", 1))
    assert all(name.startswith("call_") for name in ids("r/0", 1))


def test_a_malformed_call_is_told(chat: ScriptedChat) -> None:
    text = '<tool_call>\n{"name": "calculator", "arguments": 12}\n</tool_call>'
    body = chat.ask([USER], text, tools=[CALCULATOR])
    assert body["choices"][0]["message"]["content"] == text
    assert body["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in body["choices"][0]["message"]
    assert "'arguments'" in body["agl"]["choices"][0]["parse_error"]


@pytest.mark.parametrize(
    ("stops", "reason"),
    [(["xyz", "STOP"], "STOP"), ("STOP", "STOP"), (["STOP", "answer"], "answer"), (["xyz"], None), (None, None)],
)
def test_the_stop_string_is_told(stops: Any, reason: str | None, chat: ScriptedChat) -> None:
    (choice,) = chat.ask([USER], chat.encode("The answer STOP"), stop=stops)["choices"]
    assert choice["stop_reason"] == reason


def test_a_stop_string_is_noticed_at_its_last_token(qwen: ServedModel) -> None:
    served = qwen.server()
    exchange = served.begin(parsed({"model": "m", "messages": [USER], "stop": "plus é"}), None)
    ids = qwen.tokenizer("12 plus é and more", add_special_tokens=False)["input_ids"]
    first = next(n for n in range(1, len(ids) + 1) if exchange.request.stop(ids[:n]))
    assert qwen.tokenizer.decode(ids[:first]) == "12 plus é"


def test_one_call_only_where_parallel_calls_are_off(qwen: ServedModel, llama: ServedModel) -> None:
    fields = {"messages": [USER], "model": "m", "tools": [CALCULATOR], "parallel_tool_calls": False}
    stop = qwen.server().begin(parsed(fields), None).request.stop
    ids = qwen.tokenizer(CALL, add_special_tokens=False)["input_ids"]
    assert [stop(ids[:-1]), stop(ids)] == [False, True]
    with pytest.raises(ApiError, match="'parallel_tool_calls' = false is not supported"):
        llama.server().begin(parsed(fields), None)


@pytest.mark.parametrize(
    "tool_choice", ["required", {"type": "function", "function": {"name": "calculator"}}], ids=["required", "named"]
)
def test_a_forced_tool_call_begins_with_masked_tokens(chat: ScriptedChat, tool_choice: object) -> None:
    rest = chat.encode(' {"expression": "1"}}\n</tool_call>')
    body = chat.ask([USER], rest, tools=[CALCULATOR], tool_choice=tool_choice)
    forced = chat.encode('<tool_call>\n{"name": "calculator", "arguments":')
    assert body["choices"][0]["token_ids"] == [*forced, *rest]
    assert body["agl"]["choices"][0]["mask"] == [False] * len(forced) + [True] * len(rest)
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "calculator"


def test_special_tokens_are_not_shown(chat: ScriptedChat) -> None:
    eos = chat.model.tokenizer.eos_token_id
    ids = [
        *chat.encode("hello"),
        chat.model.tokenizer.convert_tokens_to_ids("<|im_start|>"),
        *chat.encode(" you"),
        eos,
    ]
    assert chat.ask([USER], ids)["choices"][0]["message"]["content"] == "hello you"


def test_messages_in_any_spelling_are_rendered_alike(chat: ScriptedChat) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression":"1"}'}}
    tool = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "1"}]}
    spelled = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {**USER, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        tool,
    ]
    plain = [{"role": "system", "content": "Be brief."}, USER, {**spelled[2], "content": ""}, {**tool, "content": "1"}]
    assert chat.ask(spelled, "x")["prompt_token_ids"] == chat.ask(plain, "x", session="other")["prompt_token_ids"]
    assert '{"name": "calculator", "arguments": {"expression": "1"}}' in chat.model.tokenizer.decode(
        chat.ask(plain, "x", session="third")["prompt_token_ids"]
    )


@pytest.mark.parametrize(
    ("fields", "message", "code"),
    [
        ({"logit_bias": {"five": 1}}, "logit_bias", "invalid_value"),
        ({"bad_words": ["no"]}, "bad_words", "unsupported_parameter"),
        ({"min_tokens": 3}, "min_tokens", "unsupported_parameter"),
        ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "unsupported_parameter"),
        ({"functions": [{"name": "f"}]}, "Send 'tools'", "unsupported_parameter"),
        ({"best_of": 3}, "best_of", "unsupported_parameter"),
        ({"n": 999}, "less than or equal to 128", "invalid_value"),
        ({"tool_choice": "required"}, "no tools", "invalid_type"),
        ({"tools": [CALCULATOR], "tool_choice": {"function": {"name": "calc"}}}, "not among", "invalid_type"),
        ({"messages": []}, "empty", "invalid_type"),
        ({"messages": [{"role": "robot", "content": ""}]}, "'robot'", "invalid_type"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text only", "unsupported_content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "no function call", "invalid_type"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, r"tool_calls' is no list", "invalid_type"),
        ({"messages": [{"role": "tool", "tool_call_id": ["x"]}]}, r"tool_call_id' is no text", "invalid_type"),
        ({"messages": [USER] * 513}, "are 513, and this model", "context_length_exceeded"),
        ({"stop": ["x"] * 33}, "'stop' will not do", "invalid_value"),
        ({"stop": "x" * 257}, "'stop.0' will not do", "invalid_value"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "'logit_bias' will not do", "invalid_value"),
        ({"guided_choice": ["x" * 99] * 1999}, "Ask for a simpler one", "invalid_value"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "sets chat_template,", "unsupported_parameter"),
        ({"chat_template_kwargs": {"tokenize": 1, "x": 2}}, "sets tokenize,", "unsupported_parameter"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(chat: ScriptedChat, fields: dict, message: str, code: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        chat.served.begin(parsed({"model": "m", "messages": [USER], **fields}), None)
    assert (caught.value.status, caught.value.code) == (400, code)
    assert caught.value.type == "invalid_request_error"


def test_what_distorts_a_reply_reaches_the_back_end(chat: ScriptedChat) -> None:
    neutral = {"top_k": -1, "min_p": 0, "logit_bias": {}, "presence_penalty": 0, "length_penalty": 1, "bad_words": []}
    asked = {"frequency_penalty": 0.5, "repetition_penalty": 1.1, "allowed_token_ids": [5]}
    exchange = chat.served.begin(parsed({"model": "m", "messages": [USER], **neutral, **asked}), None)
    assert exchange.request.distortions == asked
    assert exchange.ignored == ()


def test_the_context_error_has_the_numbers(qwen: ServedModel) -> None:
    chat = ScriptedChat(replace(qwen, context_length=30))
    count = len(chat.ask([USER], "x")["prompt_token_ids"])
    with pytest.raises(ApiError, match=rf"alone are {count + 100} tokens of this model's 30") as caught:
        chat.ask([{"role": "user", "content": USER["content"] + "5" * 100}], "x")
    assert (caught.value.code, caught.value.status) == ("context_length_exceeded", 400)
    exact = replace(qwen, context_length=count + 1)
    assert ScriptedChat(exact).ask([USER], "x")["prompt_token_ids"]
    with pytest.raises(ApiError, match="no room"):
        ScriptedChat(replace(qwen, context_length=count)).ask([USER], "x")


def test_a_text_that_is_much_too_long_is_not_tokenised_whole(
    chat: ScriptedChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, encode = [], chat.served.text.encode
    monkeypatch.setattr(chat.served.text, "encode", lambda text: (encoded.append(len(text)), encode(text))[1])
    with pytest.raises(ApiError, match="more than this model's 512 tokens") as caught:
        chat.ask([{"role": "user", "content": "12 " * 10**6}], "x")
    assert caught.value.code == "context_length_exceeded"
    assert sum(encoded) < 10**5


async def test_what_takes_long_keeps_nobody_waiting(qwen: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    served, begun, go_on = qwen.server(), threading.Event(), threading.Event()
    begin = served.begin

    def begin_late(*arguments: Any, **more: Any) -> PendingReply:
        begun.set()
        go_on.wait()
        return begin(*arguments, **more)

    monkeypatch.setattr(served, "begin", begin_late)
    async with client_of(create_app({"m": served}, ScriptedBackend(), api_key="key")) as client:
        body = {"model": "m", "messages": [{"role": "user", "content": "12 " * 30_000}]}
        asking = asyncio.create_task(client.post(CHAT_COMPLETIONS, json=body))
        await asyncio.to_thread(begun.wait, 10)
        assert (await client.get(MODELS)).status_code == 200
        assert not asking.done()
        monkeypatch.setattr(api, "PROMPT_TIMEOUT", 0.01)
        late = await client.post(CHAT_COMPLETIONS, json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "timeout")
        go_on.set()
        assert (await asking).json()["error"]["code"] == "context_length_exceeded"


TYPES = {400: "invalid_request_error", 404: "not_found_error", 500: "server_error"}


async def test_every_error_has_the_shape_of_the_api(qwen: ServedModel) -> None:
    divides = with_template(qwen, "{{ 1 / 0 }}").server()
    backend = ScriptedBackend(failure=NotImplementedError("no model"))
    app = create_app({"m": qwen.server(), "divides": divides}, backend, api_key="key")
    whole = orjson.dumps({"model": "m", "messages": [USER]})
    nested = b'"guided_json": ' + b"[" * 990 + b"]" * 990
    async with client_of(app) as client:
        for body, status, words in (
            (whole[:-1] + b", " + nested + b"}", 400, "nested too deeply"),
            (whole.replace(b'"m"', b'"divides"'), 400, "chat template: division by zero"),
            (whole.replace(b'"m"', b'"divide"'), 404, "Did you mean 'divides'"),
            (b'{"model": "m"}', 400, "messages"),
            (b"[]", 400, "object"),
            (b"{", 400, "JSON"),
            (whole, 500, "NotImplementedError: no model"),
        ):
            reply = await client.post(CHAT_COMPLETIONS, content=body)
            error = reply.json()["error"]
            assert (reply.status_code, error["type"]) == (status, TYPES[status])
            assert words in error["message"]
        for sent in ("Bearer other", "key", "Basic key", ""):
            for path, ask in ((CHAT_COMPLETIONS, client.post), (MODELS, client.get)):
                reply = await ask(path, headers={"authorization": sent})
                assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_what_tunes_a_hosted_service_is_ignored_and_noted(qwen: ServedModel) -> None:
    """A field that is not known here does not fail an agent, and the reply names it."""
    body = {"model": "m", "messages": [USER]}
    tuned = {"verbosity": "low", "prompt_cache_retention": "24h", "store": True, "reasoning_effort": "none"}
    unknown = {"temprature": 0, "größe\n": {"a": 1}, "add_generation_prompt": False, "nothing": None}
    neutral = {"modalities": ["text"], "response_format": {"type": "text"}, "top_k": -1, "best_of": 1, "user": None}
    async with client_of(create_app({"m": qwen.server()}, ScriptedBackend([[5]]), api_key="key")) as client:
        noted = (await client.post(CHAT_COMPLETIONS, json=body | tuned | unknown)).headers["x-agl-ignored"]
        assert set(noted.split(", ")) == {*tuned, "temprature", "gr%C3%B6%C3%9Fe%0A", "add_generation_prompt"}
        assert "x-agl-ignored" not in (await client.post(CHAT_COMPLETIONS, json=body | neutral)).headers


def test_a_template_that_refuses_is_quoted(llama: ServedModel) -> None:
    calls = [{"type": "function", "function": {"name": "calculator", "arguments": "{}"}}] * 2
    with pytest.raises(ApiError, match="only supports single tool-calls at once") as caught:
        ScriptedChat(llama).ask([USER, {"role": "assistant", "tool_calls": calls}], "x")
    assert caught.value.code == "template_error"


def test_tools_of_a_template_without_them_are_plain_text(qwen: ServedModel) -> None:
    """Shown, called, answered, and the call's own ids go into the next prompt."""
    chat = ScriptedChat(with_template(qwen, TURNS))
    first = chat.ask([USER], 'Action: calculator  {"expression":"12+30"}', tools=[CALCULATOR])
    choice = first["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "calculator",
        {"expression": "12+30"},
    )
    messages = [USER, choice["message"], result(choice["message"])]
    second = chat.ask(messages, "It is 42.", tools=[CALCULATOR])
    tail = chat.encode("\n<|im_start|>user\nObservation: 42<|im_end|>\n<|im_start|>assistant\n")
    assert_continues(first, second, tail)
    assert "calculator(expression: any)" in qwen.tokenizer.decode(second["prompt_token_ids"])
    assert second["choices"][0]["message"]["content"] == "It is 42."


def test_tools_need_a_known_format(qwen: ServedModel) -> None:
    plain = with_template(qwen, "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}")
    with pytest.raises(ApiError, match="no format known here") as caught:
        plain.server().begin(parsed({"model": "m", "messages": [USER], "tools": [CALCULATOR]}), None)
    assert caught.value.code == "tools_not_supported"


def test_output_that_is_not_finite_is_an_engine_error(chat: ScriptedChat) -> None:
    exchange = chat.served.begin(parsed({"model": "m", "messages": [USER]}), None)
    response = Response([SampledToken(0, 5, math.nan)], FinishReason.LENGTH)
    with pytest.raises(ApiError, match="diverged") as caught:
        chat.served.finish(exchange, Generation(exchange.request, (response,), 4, 0, 0))
    assert caught.value.status == 500


def test_a_template_that_has_a_variable_for_a_field_gets_it(qwen: ServedModel) -> None:
    chat = ScriptedChat(with_template(qwen, f"{{{{ reasoning_effort }}}}{TURNS}"))
    shown = [chat.ask([USER], "x", **fields)["prompt_token_ids"] for fields in ({"reasoning_effort": "low"}, {})]
    assert shown[0] == [*chat.encode("low"), *shown[1]]


def test_reasoning_that_comes_back_is_shown_by_the_template(qwen: ServedModel) -> None:
    turn = "{% for m in messages %}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    chat = ScriptedChat(with_template(qwen, turn + "{% endfor %}"))
    thought = [{"type": "text", "text": "12 "}, {"type": "text", "text": "plus"}]
    spelled: list[dict[str, Any]] = [
        {"reasoning_content": "12 plus", "content": "42"},
        {"reasoning": "12 plus", "content": "42"},
        {"content": [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "42"}]},
        {"content": [{"type": "thinking", "thinking": "12 plus"}, {"type": "text", "text": "42"}]},
    ]
    for message in spelled:
        body = chat.ask([USER, {"role": "assistant", **message}], "x", session=None)
        assert qwen.tokenizer.decode(body["prompt_token_ids"]) == "What is 12 plus 30?(12 plus)42"
