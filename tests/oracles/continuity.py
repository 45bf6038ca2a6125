"""Conversations by the chat templates of model families: how much of the prompts is carried over, as it was sampled.

    .venv-oracles/bin/python -m tests.oracles.continuity    # writes docs/templates.json and docs/exactness.md

The templates are those that TRL keeps of each family, byte for byte; two are written here. Responses are sampled one
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
from agl_chat.formats import LlamaJson
from agl_chat.parsing import detect_thinking
from agl_chat.requests import normalise
from agl_core.apis.errors import ApiError
from agl_core.types import PrefixBreak

from ..benchmarks.tables import replaced, table

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "algorithms" / "chat" / "tests"))
from parser_cases import WRITERS  # noqa: E402

PAGE = ROOT / "docs" / "exactness.md"
DATA = ROOT / "docs" / "templates.json"

MISTRAL = """\
{%- set ask = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ask.last = loop.index0 %}{% endif %}{% endfor %}
{{- '<s>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'user' %}
{%- if tools and loop.index0 == ask.last %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('a call has an id of 9 characters') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ m.content + '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}{{ call.function | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}{{ ']</s>' }}
{%- else %}{{ m.content + '</s>' }}{% endif %}
{%- endfor %}"""
DEEPSEEK_V31 = """\
{{- '<｜begin▁of▁sentence｜>' }}
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for tool in tools or [] %}{{ '\n' + tool | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.role == 'assistant' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<｜Assistant｜></think>' }}{% endif %}
{{- m.content.split('</think>')[-1] }}
{%- for call in m.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '' }}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments | tojson }}
{{- '<｜tool▁call▁end｜>' }}{{ '<｜tool▁calls▁end｜>' if loop.last else '' }}{% endfor %}
{{- '<｜end▁of▁sentence｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<｜Assistant｜></think>' }}{% endif %}"""


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
        Family("DeepSeek V3.1, not thinking (written here)", DEEPSEEK_V31, deepseek, thinks=False),
        Family("Mistral (written here)", MISTRAL, "</s>"),
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

    def ask(
        self, messages: Sequence[Message], content: str = "", *calls: tuple[str, Any], is_cut: bool = False
    ) -> Message:
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
        if not is_cut:
            end = self._family.end_of_calls if calls and self._family.end_of_calls else self._family.end
            response += text.encode(end)
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
    """Four questions, one after the other"""
    messages = [SYSTEM]
    for _ in range(4):
        messages += [user()]
        messages += [agent.ask(messages, ANSWER)]


def tool_loop(agent: Agent) -> None:
    """One question, three calls of tools one after the other, an answer"""
    messages = [SYSTEM, user()]
    for call in (ADD, SEARCH, ADD):
        messages += [agent.ask(messages, "", call)]
        messages += results(messages[-1])
    agent.ask(messages, ANSWER)


def tools_and_questions(agent: Agent) -> None:
    """Three questions, each answered after a call"""
    messages = [SYSTEM]
    for call in (ADD, SEARCH, ADD):
        messages += [user()]
        messages += [agent.ask(messages, "", call)]
        messages += results(messages[-1])
        messages += [agent.ask(messages, ANSWER)]


def parallel_tools(agent: Agent) -> None:
    """Two calls in one reply, twice"""
    messages = [SYSTEM, user()]
    for _ in range(2):
        messages += [agent.ask(messages, "", ADD, SEARCH)]
        messages += results(messages[-1])
    agent.ask(messages, ANSWER)


def text_with_calls(agent: Agent) -> None:
    """Text before each call"""
    messages = [SYSTEM, user()]
    for call in (ADD, SEARCH):
        messages += [agent.ask(messages, "Let me see.\n", call)]
        messages += results(messages[-1])
    agent.ask(messages, ANSWER)


def other_json(agent: Agent) -> None:
    """The client writes a call's arguments in another style of JSON"""
    messages = [SYSTEM, user()]
    for call in (ADD, SEARCH):
        reply = agent.ask(messages, "", call)
        for sent in reply["tool_calls"]:
            arguments = json.loads(sent["function"]["arguments"])
            sent["function"] = {**sent["function"], "arguments": json.dumps(arguments, indent=2)}
        messages += [reply, *results(reply)]
    agent.ask(messages, ANSWER)


def cut_reply(agent: Agent) -> None:
    """A reply is cut by the token limit, and the agent asks to go on"""
    messages = [SYSTEM, user()]
    messages += [agent.ask(messages, ANSWER[:15], is_cut=True), user("Go on.")]
    messages += [agent.ask(messages, ANSWER), user("And then?")]
    agent.ask(messages, ANSWER)


def malformed_call(agent: Agent) -> None:
    """A call is malformed, and the agent says so"""
    messages = [SYSTEM, user()]
    messages += [agent.ask(messages, "add(12, 30) {"), user("That is no call.")]
    messages += [agent.ask(messages, "", ADD)]
    messages += results(messages[-1])
    agent.ask(messages, ANSWER)


def edited_reply(agent: Agent) -> None:
    """The agent shortens the first of three replies"""
    messages = [SYSTEM, user()]
    messages += [agent.ask(messages, ANSWER) | {"content": "It is 42."}, user()]
    messages += [agent.ask(messages, ANSWER), user()]
    agent.ask(messages, ANSWER)


def changed_system(agent: Agent) -> None:
    """The system message has a counter of turns"""
    messages: list[Message] = []
    for turn in range(3):
        messages += [user()]
        system = {**SYSTEM, "content": f"{SYSTEM['content']} This is turn {turn}."}
        messages += [agent.ask([system, *messages], ANSWER)]


def sub_agent(agent: Agent) -> None:
    """A tool is a sub-agent with a conversation of its own"""
    messages = [SYSTEM, user()]
    messages += [agent.ask(messages, "", SEARCH)]
    own = [{"role": "system", "content": "You search. Say what you found."}, user("Who was born in 42?")]
    own += [agent.ask(own, "", ADD)]
    own += results(own[-1])
    agent.ask(own, ANSWER)
    messages += results(messages[-1])
    agent.ask(messages, ANSWER)


def summary(agent: Agent) -> None:
    """After two questions a summary replaces the conversation, which goes on"""
    messages = [SYSTEM]
    for _ in range(2):
        messages += [user()]
        messages += [agent.ask(messages, ANSWER)]
    messages = [SYSTEM, user("Summary: 12 and 30 were added. Go on.")]
    for _ in range(2):
        messages += [agent.ask(messages, ANSWER), user()]
    agent.ask(messages, ANSWER)


CONVERSATIONS: Sequence[Callable[[Agent], None]] = (
    questions, tool_loop, tools_and_questions, parallel_tools, text_with_calls, other_json, cut_reply, malformed_call,
    edited_reply, changed_system, sub_agent, summary,
)  # fmt: skip
WITH_CALLS = (*CONVERSATIONS[1:6], malformed_call, sub_agent)


def play(family: Family, conversation: Callable[[Agent], None]) -> str:
    """The table's cell of a conversation: the share of tokens carried over, and the number of breaks by cause."""
    needs_tools, tool_format = conversation in WITH_CALLS, family.text.tool_format
    if needs_tools and (not family.takes_tools or tool_format is None):
        return "–"
    if conversation is text_with_calls and isinstance(tool_format, LlamaJson):
        return "–"
    agent = Agent(family, tools=needs_tools)
    try:
        conversation(agent)
    except ApiError:
        return "×"
    causes = "".join(f" {count}{cause.value[0]}" for cause, count in sorted(agent.causes.items()))
    return f"{agent.carried / agent.tokens:.0%}{causes}"


SHOWN = {"four questions": questions, "a loop of tools": tool_loop, "tools, then questions": tools_and_questions}
"""The columns of the page: the others follow from these, or break with every template."""


def played() -> dict[str, dict[str, str]]:
    """Every cell, by template and conversation."""
    return {
        family.name: {str(conversation.__doc__): play(family, conversation) for conversation in CONVERSATIONS}
        for family in families()
    }


def data(cells: dict[str, dict[str, str]]) -> str:
    return json.dumps(cells, indent=1, ensure_ascii=False) + "\n"


def page(cells: dict[str, dict[str, str]]) -> str:
    """The page with its table written anew."""
    rows = (
        " | ".join([name, *(of_template[str(conversation.__doc__)] for conversation in SHOWN.values())])
        for name, of_template in cells.items()
    )
    text = f"\n{table(' | '.join(['template', *SHOWN]), rows)}\n\nTemplates of TRL {version('trl')}.\n"
    return replaced(PAGE.read_text(), "tests/oracles/continuity.py", text)


if __name__ == "__main__":
    cells = played()
    DATA.write_text(data(cells))
    PAGE.write_text(page(cells))
