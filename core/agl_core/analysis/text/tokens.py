"""The texts of recorded tokens, where the run's folder has the tokenizer and the environment has what reads it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def token_texts(folder: Path, policy: str, ids: Iterable[int]) -> list[str] | None:
    """The text of each token by the policy's last checkpoint in the run's folder; None without that.

    A character of several tokens is shown as a replacement character in each of them.
    """
    files = sorted(file for file in folder.glob("checkpoints/*/*/model/tokenizer.json") if file.parts[-3] == policy)
    if not files:
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(files[-1]))
        return [str(tokenizer.decode([id], skip_special_tokens=False)) for id in ids]
    except Exception:  # `tokenizers` is optional, and raises plain Exception for a file that it cannot read.
        return None
