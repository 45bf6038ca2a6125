"""Loading a tokenizer exactly as it was saved."""

from __future__ import annotations

import os
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from agl_core.errors import EngineError


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub name, with its own chat template.

    Where there is a `tokenizer.json`, that file is the tokenizer. `AutoTokenizer` may choose a class by the model's
    type instead, which brings a pre-tokenizer of its own: every id of a hand-made BPE beside a Qwen2
    configuration would differ from those the model was trained on.
    """
    whole = cached_file(model, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    own_code = trust_remote_code and _has_own_code(model)
    if whole is not None and not own_code:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    else:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    if not tokenizer.chat_template:
        raise EngineError(
            f"The tokenizer of '{model}' has no chat template, so conversations cannot be rendered. Use an "
            f"instruction-tuned model, or put a chat_template.jinja beside tokenizer.json."
        )
    return tokenizer


def _has_own_code(model: str) -> bool:
    config = cached_file(model, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
    if config is None or not os.path.isfile(config):
        return False
    with open(config, encoding="utf-8") as file:
        return '"auto_map"' in file.read()
