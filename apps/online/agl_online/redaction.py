"""Patterns that are taken out of texts before they are stored."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agl_core.types import Call, Choice, Json

PATTERNS: Mapping[str, str] = {
    "email": r"[\w.%+-]{1,64}@[\w-]+(?:\.[\w-]+)+",
    "card": r"\b\d(?:[ -]?\d){12,18}\b",
    "phone": r"(?<![\w+])(?:\+|00)?\d(?:[ ()./-]{0,2}\d){7,14}(?!\w)",
    "ip": r"\b\d{1,3}(?:\.\d{1,3}){3}\b",
    "secret": r"\b(?:sk|pk|rk|ghp|gho|glpat|xox[abprs]|AKIA)[-_A-Za-z0-9]{12,}|(?<=Bearer )[-_.=+/A-Za-z0-9]{12,}",
}
"""The patterns that have a name. What stands before an @ is bounded, as in RFC 5321, so that looking for it is."""


def _is_text_part(value: Json) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("text"), str)


class Redaction:
    """Replaces what the patterns match: names of `PATTERNS`, and regular expressions.

    >>> Redaction(["email", "order [0-9]+"]).text("ada@example.org asks for order 17")
    '[EMAIL] asks for [REDACTED]'
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [
            (re.compile(PATTERNS.get(pattern, pattern)), f"[{pattern.upper() if pattern in PATTERNS else 'REDACTED'}]")
            for pattern in patterns
        ]

    def text(self, text: str) -> str:
        """The text as it may be stored."""
        for pattern, mark in self._patterns:
            text = pattern.sub(mark, text)
        return text

    def json(self, value: Json) -> Json:
        """A JSON value as it may be stored: all its texts, its keys, and numbers that read like a match."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.json(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return self._parts([self.json(part) for part in value])
        if isinstance(value, int | float) and not isinstance(value, bool):
            written = str(value)
            redacted = self.text(written)
            return value if redacted == written else redacted
        return value

    def _parts(self, values: list[Json]) -> list[Json]:
        """The values; where text parts beside each other match together, the first has all of their text."""
        redacted: list[Json] = []
        for is_text, run in itertools.groupby(values, _is_text_part):
            parts: list[Any] = list(run)
            whole = "".join(part["text"] for part in parts) if is_text and len(parts) > 1 else ""
            if (text := self.text(whole)) != whole:
                parts = [{**parts[0], "text": text}, *({**part, "text": ""} for part in parts[1:])]
            redacted += parts
        return redacted

    def call(self, call: Call) -> Call:
        """A call as it may be stored. If its texts change, it loses its token ids: they would bring the texts back."""
        if not self._patterns:
            return call
        messages = [[choice.message, choice.parse_error] for choice in call.choices]
        texts: list[Any] = [call.request, call.state, call.agent, call.parent_span, messages]
        redacted = [self.json(text) for text in texts]
        if redacted == texts:
            return call
        request, state, agent, parent_span, messages = redacted
        choices = tuple(
            Choice(choice.index, message, choice.finish_reason, parse_error=parse_error)
            for choice, (message, parse_error) in zip(call.choices, messages, strict=True)
        )
        return replace(
            call,
            request=request,
            state=state,
            agent=agent,
            parent_span=parent_span,
            choices=choices,
            prompt_ids=None,
        )
