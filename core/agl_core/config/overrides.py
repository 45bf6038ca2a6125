"""`--set KEY=VALUE`: changing single keys of a configuration without editing its file."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any, TypeAlias

from agl_core.errors import ConfigError

Key: TypeAlias = tuple[str, ...]
"""A dotted key, as its parts."""


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> set[Key]:
    """Change `data` in place by `KEY=VALUE` texts; returns the keys that were set.

    A key is dotted, a value is a TOML value; what is no TOML value is taken as a plain string. Names in a key need no
    quotes, but where they have a dot.

    >>> data = {"train": {"steps": 100}}
    >>> sorted(apply_overrides(data, ["train.steps=5", "model.path=Qwen/Qwen2.5-0.5B"]))
    [('model', 'path'), ('train', 'steps')]
    >>> data
    {'train': {'steps': 5}, 'model': {'path': 'Qwen/Qwen2.5-0.5B'}}
    """
    return {_apply(data, override) for override in overrides}


def _apply(data: dict[str, Any], override: str) -> Key:
    written, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override}: must be KEY=VALUE, for instance --set train.steps=20.")
    key = _parse_key(written, override)
    table = data
    for depth, part in enumerate(key[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: '{'.'.join(key[:depth])}' is a value, not a table with keys.")
    table[key[-1]] = _parse_value(value.strip(), override)
    return key


def _parse_key(written: str, override: str) -> Key:
    try:
        parsed: Any = tomllib.loads(f"{written} = 0")
    except tomllib.TOMLDecodeError:
        names = written.strip().split(".")
        if all(names) and not set(written.strip()) & set("\"' \t\n[]{}#"):
            return tuple(names)  # Of names that TOML wants in quotes, which a shell would take away: reinforce++.
        raise ConfigError(f"--set {override}: '{written}' is not a dotted key, for instance train.steps.") from None
    parts: list[str] = []
    while isinstance(parsed, dict):
        if len(parsed) != 1:
            raise ConfigError(f"--set {override}: sets more than one key; write one --set for each.")
        [(part, parsed)] = parsed.items()
        parts.append(part)
    return tuple(parts)


def _parse_value(value: str, override: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError as error:
        if value[:1] in ("[", "{", '"', "'"):
            raise ConfigError(f"--set {override}: the value is not valid TOML ({error}).") from None
        return value
    if parsed.keys() != {"value"}:
        raise ConfigError(f"--set {override}: sets more than one key; write one --set for each.")
    return parsed["value"]
