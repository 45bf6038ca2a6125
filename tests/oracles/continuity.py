"""Conversations by the chat templates of model families: how much of the prompts is carried over, as it was sampled.

    .venv-oracles/bin/python -m tests.oracles.continuity    # writes docs/exactness.md

The templates are those that TRL keeps of each family, byte for byte. Responses are sampled one
character a token, as no tokenizer would write them: what is tokenised again cannot pass for what was sampled.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agl_chat.conversation import ChatText, ReplyMemory
from agl_chat.parsing import detect_thinking
from agl_chat.requests import normalise
from agl_core.apis.errors import ApiError
from agl_core.types import PrefixBreak

from ..benchmarks.tables import replaced, table

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "algorithms" / "chat" / "tests"))
from parser_cases import WRITERS  # noqa: E402

PAGE = ROOT / "docs" / "exactness.md"


@dataclass(frozen=True)
class Family:
    """A model family's chat template, and the token that ends its responses (and its calls, if that is another one)."""

    name: str
    template: str
    end: str
    end_of_calls: str = ""
    thinks: bool = True
    """True if it does so where the template has tags for it."""

    @functools.cached_property
    def text(self) -> ChatText:
        ends = {self.end, self.end_of_calls or self.end}
        marks = {*re.findall(r"<\|?[\w▁｜/|:-]+\|?>|\[/?[A-Z_]{4,}\]|<[\w|]+\|>|<\|\w+>", self.template), *ends}
        markers = [mark for mark in sorted(marks) if not mark.startswith(("<function", "<parameter", "<tool_resp"))]
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=2000, special_tokens=markers, initial_alphabet=alphabet, show_progress=False
        )
        bpe.train_from_iterator([self.template, QUESTION, ANSWER, THOUGHTS, json.dumps(TOOLS)] * 4, trainer)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=self.end, bos_token=markers[0])
        tokenizer.chat_template = self.template
        return ChatText(tokenizer, tokenizer.convert_tokens_to_ids(sorted(ends)))

    @property
    def takes_tools(self) -> bool:
        return self.text.tool_format is not None and self.text.takes_tools


def of_trl(name: str) -> str:
    """A template as TRL keeps it."""
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text()


def families() -> list[Family]:
    chatml, llama, deepseek = "<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>"
    return [
        Family("agl's examples (append-only)", (ROOT / "examples" / "chatml.jinja").read_text(), chatml),
        Family("Qwen2.5", of_trl("qwen2_5"), chatml),
        Family("Qwen3, thinking", of_trl("qwen3"), chatml),
        Family("Qwen3, not thinking", of_trl("qwen3"), chatml, thinks=False),
        Family("Qwen3, thinking, TRL's template for training", of_trl("qwen3_training"), chatml),
        Family("Qwen3, not thinking, TRL's template for training", of_trl("qwen3_training"), chatml, thinks=False),
        Family("Qwen3 Instruct 2507", of_trl("qwen3_instruct_2507"), chatml),
        Family("Qwen3.5, thinking", of_trl("qwen3_5_think"), chatml),
        Family("Qwen3.6", of_trl("qwen3_6"), chatml),
        Family("GLM 4.5", of_trl("glm4moe"), "<|user|>", "<|observation|>"),
        Family("Llama 3", of_trl("llama3"), llama),
        Family("Llama 3.1", of_trl("llama3_1"), llama),
        Family("Llama 3.2", of_trl("llama3_2"), llama),
        Family("Nemotron 3 Nano", of_trl("nemotron_3_nano"), chatml),
        Family("DeepSeek R1, distilled", of_trl("deepseek_r1_distill"), deepseek),
        Family("DeepSeek V3", of_trl("deepseekv3"), deepseek),
        Family("Gemma 3", of_trl("gemma3"), "<end_of_turn>"),
        Family("Phi 3.5", of_trl("phi3_5"), "<|end|>"),
        Family("Aya (Cohere)", of_trl("cohere"), "<|END_OF_TURN_TOKEN|>"),
    ]


QUESTION, ANSWER = "What is 12 plus 30, and who was born in that year?", "It is 42.\n\nClaudius was emperor  then."
THOUGHTS = "First 12,  then 30.\nSo 42."
SYSTEM = {"role": "system", "content": "You answer questions about numbers and years. Be brief, and use the tools."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.capitalize()} something.",
            "parameters": {"type": "object", "properties": {key: {"type": kind}}, "required": [key]},
        },
    }
    for name, key, kind in (("add", "terms", "array"), ("search", "query", "string"))
]
ADD, SEARCH = ("add", {"terms": [12, 30]}), ("search", {"query": "born in the year 42"})
Message = dict[str, Any]


def user(text: str = QUESTION) -> Message:
    return {"role": "user", "content": text}


class Agent:
    """Converses with a scripted model of one family, and notes what of each prompt was carried over."""

    def __init__(self, family: Family, *, tools: bool) -> None:
        self._family, self._tools = family, TOOLS if tools else []
        self._sessions = ReplyMemory(family.text)
        self._recorded: list[list[int]] = []
        self.tokens, self.carried = 0, 0
        """Of all prompts but the first: tokens, and those that an earlier prompt and response begin with, exactly."""
        self.causes: Counter[PrefixBreak] = Counter()

    def ask(self, messages: Sequence[Message], content: str, *calls: tuple[str, Any]) -> Message:
        """The reply, as a client sends it back: without its reasoning."""
        text, normal = self._family.text, normalise(messages)
        options = {} if self._family.thinks else {"enable_thinking": False}
        prompt = self._sessions.prompt("", normal, tools=self._tools, options=options)
        ids = prompt.ids.tolist()
        if self._recorded:
            self.tokens += len(ids)
            self.carried += max(len(known) if ids[: len(known)] == known else 0 for known in self._recorded)
        if prompt.prefix_broken:
            self.causes[prompt.prefix_broken] += 1
        written = self._thoughts(prompt.is_thinking) + content + self._calls(calls)
        response = [token for character in self._pieces(written) for token in text.encode(character)]
        response += text.encode(self._family.end_of_calls if calls and self._family.end_of_calls else self._family.end)
        parsed = text.parser(self._tools, is_thinking=prompt.is_thinking).parse(text.decode(response))
        assert len(parsed.calls) == len(calls), (self._family.name, written, parsed)
        message: Message = {"role": "assistant", "content": parsed.content}
        if calls:
            ids_of_calls = [f"call_{len(self._recorded):08x}{index}" for index in range(len(calls))]
            message["tool_calls"] = [
                {"id": name, "type": "function", "function": call.as_json()}
                for name, call in zip(ids_of_calls, parsed.calls, strict=True)
            ]
        (recorded,) = normalise([{**message, "reasoning_content": parsed.reasoning}])
        self._sessions.record("", normal, prompt, [(recorded, np.array(response, np.int32))])
        self._recorded.append(ids + response)
        return message

    def _thoughts(self, is_thinking: bool) -> str:
        tags = detect_thinking(self._family.template)
        if tags is None or not self._family.thinks:
            return ""
        first = "" if is_thinking else f"{tags.first}\n"
        return f"{first}{THOUGHTS}\n{tags.last}\n\n"

    def _calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        if not calls:
            return ""
        name = self._family.text.tool_format.name if self._family.text.tool_format else ""
        if name == "plain_text":
            return "\n" + "\n".join(f"Action: {tool} {json.dumps(arguments)}" for tool, arguments in calls)
        return WRITERS[name](calls)

    def _pieces(self, written: str) -> list[str]:
        """Characters, but for the tokens that a tokenizer never cuts."""
        format_ = self._family.text.tool_format
        tags = detect_thinking(self._family.template)
        whole = [*(format_.markers if format_ else ()), *((tags.first, tags.last) if tags else ())]
        return re.findall("|".join([*map(re.escape, whole), "."]), written, re.DOTALL)


def results(message: Message) -> list[Message]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in message["tool_calls"]]


def questions(agent: Agent) -> None:
    messages = [SYSTEM]
    for _ in range(4):
        messages += [user()]
        messages += [agent.ask(messages, ANSWER)]


def tool_loop(agent: Agent) -> None:
    messages = [SYSTEM, user()]
    for call in (ADD, SEARCH, ADD):
        messages += [agent.ask(messages, "", call)]
        messages += results(messages[-1])
    agent.ask(messages, ANSWER)


def tools_and_questions(agent: Agent) -> None:
    messages = [SYSTEM]
    for call in (ADD, SEARCH, ADD):
        messages += [user()]
        messages += [agent.ask(messages, "", call)]
        messages += results(messages[-1])
        messages += [agent.ask(messages, ANSWER)]


def parallel_tools(agent: Agent) -> None:
    messages = [SYSTEM, user()]
    for _ in range(2):
        messages += [agent.ask(messages, "", ADD, SEARCH)]
        messages += results(messages[-1])
    agent.ask(messages, ANSWER)


def play(family: Family, conversation: Callable[[Agent], None]) -> str:
    """The table's cell of a conversation: the share of tokens carried over, and the number of breaks by cause."""
    needs_tools = conversation is not questions
    if needs_tools and not family.takes_tools:
        return "–"
    agent = Agent(family, tools=needs_tools)
    try:
        conversation(agent)
    except ApiError:
        return "×"
    causes = "".join(f" {count}{cause.value[0]}" for cause, count in sorted(agent.causes.items()))
    return f"{agent.carried / agent.tokens:.0%}{causes}"


CONVERSATIONS = {
    "four questions": questions,
    "a loop of tools": tool_loop,
    "tools, then questions": tools_and_questions,
    "two calls at once": parallel_tools,
}


def page() -> str:
    """The page with its table written anew."""
    rows = (
        " | ".join([family.name, *(play(family, conversation) for conversation in CONVERSATIONS.values())])
        for family in families()
    )
    text = f"\n{table(' | '.join(['template', *CONVERSATIONS]), rows)}\n\nTemplates of TRL {version('trl')}.\n"
    return replaced(PAGE.read_text(), "tests/oracles/continuity.py", text)


if __name__ == "__main__":
    PAGE.write_text(page())
