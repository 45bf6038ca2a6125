"""vLLM's own parsers read the responses of `parser_cases.py`. Needs vLLM, but no Ray and no model.

AGL_RECORD=1 writes what they give into `parsers.jsonl`.
"""

from __future__ import annotations

import json
import os
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from agl_chat.formats import FORMATS

from .parser_cases import FIXTURE, REASONING_PARSERS, THOUGHTS, TOOLS, WRITERS, texts


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer that has the markers of a format, which is what the parsers want of one."""
    markers = next((tool_format.markers for tool_format in FORMATS if tool_format.name == name), ())
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.add_special_tokens([*markers, "<think>", "</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")


REQUEST = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m", tools=TOOLS)


def read(name: str, text: str) -> tuple[str, list[Any]]:
    parser = ToolParserManager.get_tool_parser("mistral" if name == "mistral_named" else name)
    reply = parser(tokenizer_of(name), REQUEST.tools).extract_tool_calls(text, REQUEST)
    calls = [[call.function.name, _value(call.function.arguments)] for call in reply.tool_calls]
    return reply.content or "", calls


def read_reasoning(name: str, text: str) -> tuple[str, str]:
    parser = ReasoningParserManager.get_reasoning_parser(name)
    reasoning, content = parser(tokenizer_of(name)).extract_reasoning(text, REQUEST)
    return content or "", reasoning or ""


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def test_the_fixture_is_what_vllm_gives() -> None:
    now = [[name, case, *read(name, text)] for name in WRITERS for case, text in texts(name).items()]
    now += [[name, text, *read_reasoning(name, text)] for name in REASONING_PARSERS for text in THOUGHTS]
    if os.environ.get("AGL_RECORD"):
        FIXTURE.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in now))
    assert [json.loads(line) for line in FIXTURE.read_text().splitlines()] == now
