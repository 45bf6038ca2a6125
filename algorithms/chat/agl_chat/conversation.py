"""Conversations as a model reads them, by its own tokenizer and chat template, with the exact ids of echoed replies.

A chat client sends the whole conversation anew each turn. Rendering and tokenising it again would often give other
tokens for the assistant's earlier replies than those that were sampled (spacing, JSON style, merges). So the prompt of
a later turn is the recorded prompt's ids + the recorded response's ids + the ids of only what is new (`ReplyMemory`).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from agl_chat.formats import PlainText, detect_format, in_plain_text
from agl_chat.parsing import Message, ReplyParser, ToolFormat, Tools, detect_thinking
from agl_chat.requests import RoleRules, find_rules, fold, meaning, normalise, with_short_ids, with_text_arguments
from agl_core.apis.dialect import wrong
from agl_core.apis.errors import CONTEXT_OVERFLOW, ApiError
from agl_core.errors import EngineError
from agl_core.learning.tool_results import messages_of, tools_of
from agl_core.types import Call, PrefixBreak, Tokens

_USUAL_CHARACTERS = 8
"""A token has fewer, but in runs of spaces and the like."""
_PART, _CUT = 1 << 16, 16
"""Characters of a part of a text, and the tokens that cutting it there may add."""


def overflow(problem: str) -> ApiError:
    return wrong("messages", f"{problem}: there is no room for a response. Shorten them", code=CONTEXT_OVERFLOW)


class ChatText:
    """Renders, encodes and decodes for one model."""

    def __init__(self, tokenizer: Any, eos_ids: Collection[int]) -> None:
        self.template = str(tokenizer.get_chat_template())
        self.tool_format: ToolFormat | None = detect_format(self.template)
        self.thinking = detect_thinking(self.template)
        self._in_plain_text = isinstance(self.tool_format, PlainText)
        self.takes_tools = "tools" in self.template or self._in_plain_text
        self.eos_ids = frozenset(eos_ids)
        self._tokenizer = tokenizer
        self.reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}
        """Names that no variable of the template may have."""
        self.eos_texts: dict[int, str] = {
            token: tokenizer.decode([token], skip_special_tokens=False) for token in sorted(eos_ids)
        }
        """The end tokens as templates write them."""
        markers = {*(self.tool_format.markers if self.tool_format else ())}
        if self.thinking:
            markers |= {self.thinking.first, self.thinking.last}
        added = tokenizer.added_tokens_decoder
        kept = {token for token, text in added.items() if text.content in markers}
        special = {token for token, text in added.items() if text.special}
        self._hidden = frozenset(special | set(tokenizer.all_special_ids)) - kept

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text; with `prompt`, up to where the assistant's reply begins.

        Raises ApiError with the template's own words when it refuses the conversation.
        """
        folded, _ = fold(self._readable(messages, tools), self.roles)
        return self._apply(folded, list(tools) if tools and not self._in_plain_text else None, prompt, options or {})

    def _readable(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Sequence[Message]:
        """Messages with tool calls, results and ids in the form that the template knows."""
        if self._in_plain_text:
            messages = in_plain_text(messages, tools)
        if self.tool_format and self.tool_format.id_length:
            messages = [with_short_ids(message, self.tool_format.id_length) for message in messages]
        return messages

    def _apply(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        prompt: bool = True,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=prompt, tokenize=False, **options
            )
        except Exception as error:  # A template is a program.
            if isinstance(error, TypeError) and (texts := with_text_arguments(messages)) != messages:
                return self._apply(texts, tools, prompt, options)
            problem = f"cannot be rendered by the model's chat template: {str(error) or type(error).__name__}"
            raise wrong("messages", problem, code="template_error") from error
        return str(text)

    @functools.cached_property
    def roles(self) -> RoleRules:
        return find_rules(lambda messages: self._apply(self._readable(messages)))

    def exceeds(self, text: str, limit: int) -> bool:
        """True if a very long text surely has more tokens: told from as many of its parts as that takes."""
        parts = (text[start : start + _PART] for start in range(0, len(text), _PART))
        counts = accumulate(len(self.encode(part)) - _CUT for part in parts)
        return len(text) > limit * _USUAL_CHARACTERS and any(count > limit for count in counts)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, as it stands: nothing is added."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_after(self, token: int, text: str) -> list[int]:
        """Token ids of a text that follows an end token (some tokenizers begin a text differently)."""
        ids = self.encode(self.eos_texts[token] + text)
        return ids[1:] if ids[:1] == [token] else self.encode(text)

    def split_end(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """The text before its first or last end token, and that token; the whole text and "" if there is none."""
        find = text.rfind if last else text.find
        ends = [(at, mark) for mark in self.eos_texts.values() if (at := find(mark)) >= 0]
        at, mark = (max if last else min)(ends, default=(len(text.rstrip()), ""))
        return text[:at], mark

    def is_thinking(self, prompt: str) -> bool:
        """True if a prompt ends with the tag that begins reasoning."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.first)

    def parser(self, tools: Tools, *, is_thinking: bool = False) -> ReplyParser:
        return ReplyParser(self.tool_format if tools else None, tools, self.thinking, is_thinking)

    def forced_prefix(self, tool: str | None, *, is_thinking: bool) -> str:
        """The start of a reply that calls this tool; reasoning that the prompt begins ends first."""
        end = f"{self.thinking.last}\n\n" if self.thinking and is_thinking else ""
        return end + (self.tool_format.forced_prefix(tool) if self.tool_format else "")

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response: without special tokens, but with the tool format's own."""
        shown = [token for token in ids if token not in self._hidden and token not in self.eos_ids]
        return str(self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @functools.cached_property
    def piece(self) -> Callable[[int], str]:
        """The text of one token by itself."""
        return functools.cache(lambda token: str(self._tokenizer.decode([token], skip_special_tokens=False)))


def tokenized(text: ChatText, call: Call) -> Call:
    """A recorded call with the token ids of its texts (`token_ids`), and without what was known of its sampling."""
    messages, tools = messages_of(call), tools_of(call)
    ids = [token_ids(text, messages, tools, c.message, is_complete=not c.finish_reason.is_cut) for c in call.choices]
    choices = [
        replace(choice, response_ids=response, logprobs=None, mask=None)
        for choice, (_, response) in zip(call.choices, ids, strict=True)
    ]
    prompt = next((prompt for prompt, _ in ids if prompt is not None), None)
    return replace(call, prompt_ids=prompt, choices=tuple(choices))


def token_ids(
    text: ChatText,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools,
    reply: Mapping[str, Any],
    *,
    is_complete: bool = True,
) -> tuple[Tokens | None, Tokens | None]:
    """Prompt and response as the chat template writes them, up to its last end token, if the reply is complete.

    None if the template refuses the conversation, or writes the prompt otherwise once the reply follows.
    """
    try:
        whole = normalise([*messages, reply])
        prompt = text.render(whole[:-1], tools=tools)
        full = text.render(whole, tools=tools, prompt=False)
        full.encode()  # No tokenizer takes lone surrogates.
    except (ApiError, UnicodeEncodeError):
        return None, None
    if not full.startswith(prompt):
        return None, None
    response, end = text.split_end(full[len(prompt) :], last=True)
    prompt_ids, response_ids = text.encode(prompt), text.encode(response)
    if is_complete:
        response_ids += text.encode(end) if end else [min(text.eos_ids)]
    return np.array(prompt_ids, np.int32), np.array(response_ids, np.int32)


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub name, with its own chat template.

    A `tokenizer.json`, if there is one, is the tokenizer, unless the model's own code is trusted: `AutoTokenizer` may
    choose a class by the model's type, whose pre-tokenizer gives other ids than the model was trained on.
    """
    whole = cached_file(model, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    if whole is not None and not trust_remote_code:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    else:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    if not tokenizer.chat_template:
        raise EngineError(
            f"The tokenizer of '{model}' has no chat template, so conversations cannot be rendered. Use an "
            f"instruction-tuned model, or put a chat_template.jinja beside tokenizer.json."
        )
    return tokenizer


def keep_tokenizer_settings(model: str, folder: Path) -> None:
    """Give a saved tokenizer the settings of the model it came from: transformers 4 cannot read those of 5."""
    with suppress(OSError):  # The model's folder may be gone.
        settings = cached_file(
            model, "tokenizer_config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False
        )
        if settings is not None:
            shutil.copyfile(settings, folder / "tokenizer_config.json")


def end_ids(*sources: Any) -> frozenset[int]:
    """Every token id that ends a response, by a model's configurations and its tokenizer."""
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or ())
    return frozenset(ids)


def load_text(model: str, *, trust_remote_code: bool = False) -> ChatText:
    """The text of a model in a folder or of a hub name, without its weights."""
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(model)
    except OSError:  # Not every model has one.
        generation = None
    return ChatText(tokenizer, end_ids(generation, config, tokenizer))


def digests(messages: Sequence[Message]) -> list[bytes]:
    """Entry k identifies what the first k messages mean, k = 0 … len(messages)."""
    return [*accumulate(map(meaning, messages), lambda before, text: _digest(before.hex() + text), initial=b"")]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A rendered conversation as the engine will feed it."""

    ids: Tokens
    prefix_broken: PrefixBreak | None
    """Why the recorded ids of an earlier reply could not be used; the latest such reply counts."""
    length: int
    """Characters."""
    digest: bytes
    """Identifies the text."""
    shown: bytes
    """Identifies the tools and the template's variables."""
    is_thinking: bool
    """The text ends with the tag that begins reasoning."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedChoice:
    """One choice that answered a prompt."""

    prompt: Prompt
    ids: Tokens
    meaning: str
    call_ids: tuple[str | None, ...]
    reasoning: str

    @property
    def nbytes(self) -> int:
        return self.prompt.ids.nbytes + self.ids.nbytes + len(self.meaning) + len(self.reasoning)


class ReplyMemory:
    """The replies that each rollout of one model got; the least recently used is forgotten beyond either bound.

    One thread records; any may make prompts.
    """

    def __init__(self, text: ChatText, *, max_sessions: int = 4096, max_bytes: int = 256 << 20) -> None:
        self._text, self._max_sessions, self._max_bytes = text, max_sessions, max_bytes
        self._sessions: OrderedDict[str, dict[bytes, list[RecordedChoice]]] = OrderedDict()
        """By session, the choices by what the messages before them mean."""
        self._nbytes = 0

    def prompt(
        self,
        key: str | None,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        moved: bool = False,
        limit: int | None = None,
    ) -> Prompt:
        """Render and encode a conversation, with the recorded ids of replies that it echoes.

        `moved`: replies that are not known here may be other servers'. ApiError if there are more tokens than `limit`.
        """

        def render(count: int, prompt: bool) -> str:
            return self._text.render(messages[:count], tools=tools, prompt=prompt, options=options)

        session = self._sessions.get(key, {}) if key is not None else {}
        before = digests(messages) if session or moved else []
        messages = [
            _with_reasoning(message, session.get(digest, ())) for message, digest in zip(messages, before, strict=False)
        ] or messages
        full, shown, cause = render(len(messages), True), _digest(json.dumps([*tools, options])), None
        if limit and self._text.exceeds(full, limit):
            raise overflow(f"alone are more than this model's {limit} tokens")
        of_text = len(full), _digest(full), shown, self._text.is_thinking(full)
        for at in range(len(before) - 2, 0, -1):
            if messages[at]["role"] != "assistant":
                continue
            choices = session.get(before[at], [])
            echoed = _echoed(choices, messages[at])
            for choice in echoed:
                tail = self._tail(full, choice, functools.partial(render, at + 1, False), tools)
                if tail is not None:
                    return Prompt(np.concatenate([choice.prompt.ids, choice.ids, tail]), cause, *of_text)
            cause = cause or self._cause(messages[at], echoed, choices, session, shown)
            cause = cause or (PrefixBreak.SERVER if moved else None)
        return Prompt(np.array(self._text.encode(full), np.int32), cause, *of_text)

    def _cause(
        self,
        message: Message,
        echoed: Sequence[RecordedChoice],
        choices: Sequence[RecordedChoice],
        session: Mapping[bytes, Sequence[RecordedChoice]],
        shown: bytes,
    ) -> PrefixBreak | None:
        """Why the ids of a reply are not used: those of `echoed` say the same, `choices` answered the same."""
        if echoed and echoed[0].prompt.shown != shown:
            return PrefixBreak.REQUEST
        if echoed:
            return PrefixBreak.TEMPLATE if self._has_ended(echoed[0]) else PrefixBreak.CUT
        if choices:
            return PrefixBreak.EDITED
        everything = (choice.meaning for others in [*session.values()] for choice in others)
        return PrefixBreak.MOVED if meaning(message) in everything else None

    def _has_ended(self, choice: RecordedChoice) -> bool:
        return len(choice.ids) > 0 and int(choice.ids[-1]) in self._text.eos_ids

    def _tail(self, full: str, choice: RecordedChoice, render: Callable[[], str], tools: Tools) -> Tokens | None:
        """Ids of what stands after the reply in `full`; None if the template writes prompt or reply otherwise now."""
        start, parser = choice.prompt.length, self._text.parser(tools, is_thinking=choice.prompt.is_thinking)
        if _digest(full[:start]) != choice.prompt.digest:
            return None

        def is_reply(written: str) -> bool:
            parsed = parser.parse(written)
            calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in parsed.calls]
            echo = {"role": "assistant", "content": parsed.content, "tool_calls": calls}
            return meaning(echo) == choice.meaning and parsed.reasoning == choice.reasoning

        written, mark = self._text.split_end(full[start:])
        if not mark or not is_reply(written):
            upto = render()  # No end token after the reply: it ends where a shorter conversation does.
            written, mark = self._text.split_end(upto[start:], last=True)
            if not full.startswith(upto) or len(upto) <= start or not is_reply(written):
                return None
        if not self._has_ended(choice):  # A reply cut short gets the end token that the template writes.
            sampled = self._text.decode(choice.ids.tolist())
            # The template also writes the end of reasoning that was cut.
            text = next((start for start in (sampled, sampled.rstrip()) if written.startswith(start)), written)
            return np.array(self._text.encode(full[start + len(text) :]), np.int32)
        last = int(choice.ids[-1])
        # The sampled end token stands for another one that the template writes, but not for the mark of what follows.
        if mark != self._text.eos_texts[last] and mark != self._text.split_end(render()[start:], last=True)[1]:
            mark = ""
        rest = full[start + len(written) + len(mark) :]
        return np.array(self._text.encode_after(last, rest), np.int32)

    def record(
        self, key: str, messages: Sequence[Message], prompt: Prompt, replies: Sequence[tuple[Message, Tokens]]
    ) -> None:
        """Remember a call: its prompt, and each choice's normalised message and response ids."""
        choices = self._sessions.setdefault(key, {}).setdefault(digests(messages)[-1], [])
        for message, ids in replies:
            reasoning = message.get("reasoning_content", "")
            choices.append(RecordedChoice(prompt, ids, meaning(message), _call_ids(message), reasoning))
            self._nbytes += choices[-1].nbytes
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._max_sessions or self._nbytes > self._max_bytes:
            key, session = next(iter(self._sessions.items()))
            forgotten = session.pop(next(iter(session)))
            self._nbytes -= sum(choice.nbytes for choice in forgotten)
            if not session:
                del self._sessions[key]


def _echoed(choices: Sequence[RecordedChoice], message: Message) -> list[RecordedChoice]:
    """Choices that say what `message` says: first the ones with its call ids, the newest first among them."""
    wanted, ids = meaning(message), _call_ids(message)
    return sorted((c for c in reversed(choices) if c.meaning == wanted), key=lambda choice: choice.call_ids != ids)


def _with_reasoning(message: Message, choices: Sequence[RecordedChoice]) -> Message:
    """An echoed reply with its reasoning, which most clients leave out; the template says whether the model sees it."""
    if message["role"] != "assistant" or "reasoning_content" in message:
        return message
    reasoning = next((choice.reasoning for choice in _echoed(choices, message)), "")
    return {**message, "reasoning_content": reasoning} if reasoning else message


def _call_ids(message: Message) -> tuple[str | None, ...]:
    return tuple(call.get("id") for call in message.get("tool_calls", ()))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
