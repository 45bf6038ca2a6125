"""When a response is complete by its text: stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agl_torch.chat.text import ChatText


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
