"""What the chat layer needs of a model: its tokenizer with the chat template, and the tokens that end a response."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from agl_chat.conversation import ChatText
from agl_core.errors import EngineError


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub name, with its own chat template.

    Where there is a `tokenizer.json`, that file is the tokenizer, unless the model's own code is trusted.
    `AutoTokenizer` may choose a class by the model's type instead, which brings a pre-tokenizer of its own: every id of
    a hand-made BPE beside a Qwen2 configuration would differ from those the model was trained on.
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
