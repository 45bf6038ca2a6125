"""Replies that were recorded as texts alone: the tokens that the policy would have had to sample for them."""

from __future__ import annotations

import numpy as np

from agl_core.types.recorded import RecordedReply, TokenizedReply
from agl_torch.chat.errors import ChatError
from agl_torch.chat.messages import normalise
from agl_torch.chat.text import ChatText


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
