"""Between text and token ids, by a model's own tokenizer and chat template."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from agl_core.errors import EngineError
from agl_core.types import RecordedReply, TokenizedReply
from agl_torch.chat.formats import PlainText, ToolFormat, detect_format, in_plain_text
from agl_torch.chat.messages import ChatError, Message, normalise

_VARIABLES = ("reasoning_effort",)
"""Fields of a request that some templates have a variable for."""


class ChatText:
    """Renders, encodes and decodes for one model."""

    def __init__(self, tokenizer: Any, eos_ids: Collection[int]) -> None:
        template = _template(tokenizer)
        self.tool_format: ToolFormat | None = detect_format(template)
        self._in_plain_text = isinstance(self.tool_format, PlainText)
        self.takes_tools = "tools" in template or self._in_plain_text
        """Whether tools are shown to the model."""
        self.variables = frozenset(name for name in _VARIABLES if name in template)
        """The fields of a request that the template shows to the model."""
        self.eos_ids = frozenset(eos_ids)
        self._tokenizer = tokenizer
        self._eos_texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in sorted(eos_ids)}
        markers = self.tool_format.markers if self.tool_format else ()
        kept = {tokenizer.convert_tokens_to_ids(marker) for marker in markers}
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
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

        Raises ChatError with the template's own words when it refuses the conversation.
        """
        if self._in_plain_text:
            messages, tools = in_plain_text(messages, tools), None
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=prompt,
                tokenize=False,
                **(options or {}),
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise ChatError(
                f"The model's chat template cannot render these messages: {error}",
                param="messages",
                code="template_error",
            ) from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, as it stands: nothing is added."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_after(self, token: int, text: str) -> list[int]:
        """Token ids of a text that follows a special token (some tokenizers begin a text differently)."""
        ids = self.encode(self._eos_texts.get(token, "") + text) if token in self._eos_texts else []
        return ids[1:] if ids[:1] == [token] else self.encode(text)

    @property
    def eos_texts(self) -> tuple[str, ...]:
        return tuple(self._eos_texts.values())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response: without special tokens, but with the tool format's own."""
        shown = [token for token in ids if token not in self._hidden and token not in self.eos_ids]
        return str(self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @functools.cached_property
    def piece(self) -> Callable[[int], str]:
        """The text of one token by itself."""
        return functools.cache(lambda token: str(self._tokenizer.decode([token], skip_special_tokens=False)))


def _template(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        raise EngineError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no chat template, so chat requests cannot be rendered: "
            "use an instruction-tuned model, or put a chat_template.jinja beside its tokenizer."
        ) from None


def cut_at(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it.

    >>> cut_at("1 2 STOP 3", ["STOP", "3"])
    '1 2 '
    """
    ends = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(ends)] if ends else text


def stop_at(text: ChatText, stops: Sequence[str], call_end: str | None) -> Callable[[Sequence[int]], bool] | None:
    """Says after each token whether the response so far has a stop string, or ends its first tool call."""
    strings = (*stops, *((call_end,) if call_end else ()))
    if not strings:
        return None
    # A character takes at most four tokens, so a string that ends here begins within this many.
    window = 4 * max(map(len, strings)) + 8

    def stopped(ids: Sequence[int]) -> bool:
        tail = text.decode(ids[-window:])
        return any(string in tail for string in strings)

    return stopped


def tokenized(text: ChatText, reply: RecordedReply) -> TokenizedReply | None:
    """Prompt and response as the chat template writes them.

    None if the template refuses the conversation, or writes the prompt otherwise once the reply follows. The end token
    is the last one that the template writes; what it writes after that was never sampled. A reply that was cut short
    has none.
    """
    try:
        messages = normalise([*reply.messages, reply.response])
        prompt = text.render(messages[:-1], tools=reply.tools)
        full = text.render(messages, tools=reply.tools, prompt=False)
        full.encode()  # No tokenizer takes lone surrogates.
    except (ChatError, UnicodeEncodeError):
        return None
    if not full.startswith(prompt):
        return None
    said, end = _apart(text, full[len(prompt) :])
    prompt_ids, response_ids = text.encode(prompt), text.encode(said)
    if reply.is_complete:
        response_ids += [min(text.eos_ids)] if end is None else text.encode(end)
    return TokenizedReply(np.array(prompt_ids, np.int32), np.array(response_ids, np.int32))


def _apart(text: ChatText, written: str) -> tuple[str, str | None]:
    """What was said, and the end token after it; None if the template writes none."""
    ends = [(at, mark) for mark in text.eos_texts if (at := written.rfind(mark)) >= 0]
    if not ends:
        return written.rstrip(), None
    at, mark = max(ends)
    return written[:at], mark
