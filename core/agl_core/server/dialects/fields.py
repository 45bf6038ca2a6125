"""Checking the fields of a request body; what is wrong is named by its path, as `tools[0].name`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import orjson

from agl_core.server.errors import ApiError
from agl_core.types import Json

Check: TypeAlias = tuple[Callable[[Any], bool], str]
"""Whether a value will do, and in words which values do."""
Fields: TypeAlias = Mapping[str, Check]
"""Checks by the name of a field."""
Refusals: TypeAlias = Mapping[str, tuple[tuple[Json, ...], str]]
"""Fields that cannot be served: the values with which they ask for nothing, and why they are refused."""

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape in a JSON string; in its group, half of a surrogate pair."""
_MAX_WRITABLE_DEPTH = 250
"""Levels of nesting that orjson writes in any case."""


def json_object(raw: bytes) -> dict[str, Any]:
    """A request body as a dict; ApiError 400 if it is none."""
    try:
        body = loads(raw)
        if raw.count(b"{") + raw.count(b"[") > _MAX_WRITABLE_DEPTH:
            orjson.dumps(body)  # What is nested more deeply than this can write could not be passed on.
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    except orjson.JSONEncodeError as error:
        raise ApiError(400, "The request body is nested too deeply.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"The request body must be a JSON object, not {shown(body)}.", code="invalid_json")
    return body


def loads(text: bytes | str) -> Any:
    r"""JSON as a value; half of a surrogate pair, which clients write where they cut a text, becomes U+FFFD.

    >>> loads(rb'["\ud83c\udf0d", "\ud83c!", "\\ud83c"]') == ["🌍", "\ufffd!", r"\ud83c"]
    True
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raw = text.encode() if isinstance(text, str) else text
        whole = _ESCAPE.sub(lambda escape: rb"\ufffd" if escape[1] else escape[0], raw)
        if whole == raw:
            raise
        return orjson.loads(whole)


def check_fields(values: Mapping[str, Any], fields: Fields, path: str = "") -> None:
    """ApiError 400 for the first value that will not do; null means absent."""
    for name, value in values.items():
        if value is not None and (field := fields.get(name)) is not None:
            check, expected = field
            if not check(value):
                raise wrong(f"{path}{name}", f"must be {expected}, not {shown(value)}")


def check_refused(values: Mapping[str, Any], refusals: Refusals) -> None:
    """ApiError 400 for the first field that asks for what cannot be served."""
    for name, (neutral, why) in refusals.items():
        if values.get(name) is not None and not is_one_of(values[name], neutral):
            raise unsupported(name, why)


def must(holds: bool, path: str, expected: str, value: object) -> None:
    """ApiError 400 unless it `holds` that the value at this path is as `expected`."""
    if not holds:
        raise wrong(path, f"must be {expected}, not {shown(value)}")


def need(values: Mapping[str, Any], name: str, path: str = "") -> Any:
    """The value of a field that must be there."""
    value = values.get(name)
    if value is None:
        raise wrong(f"{path}{name}", "is missing", code="missing_required_parameter")
    return value


def need_text(values: Mapping[str, Any], name: str, path: str = "") -> str:
    """The text of a field that must be there."""
    value: str = need(values, name, path)
    must(isinstance(value, str), f"{path}{name}", "a string", value)
    return value


def objects(values: Any, path: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a list, each with its path."""
    must(isinstance(values, list), path, "a list of objects", values)
    entries = [(f"{path}[{index}]", value) for index, value in enumerate(values)]
    for own_path, value in entries:
        must(isinstance(value, dict), own_path, "an object", value)
    return entries


def wrong(param: str, problem: str, code: str = "invalid_type") -> ApiError:
    """The refusal of a value that the API itself does not allow."""
    return ApiError(400, f"'{param}' {problem}.", param=param, code=code)


def unsupported(param: str, problem: str) -> ApiError:
    """The refusal of what the API allows and agl cannot do."""
    return wrong(param, problem, code="unsupported_parameter")


def shown(value: object) -> str:
    """A value as an error message shows it."""
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else text[:57] + "…"


def without_none(values: Mapping[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in values.items() if value is not None}


def is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


def is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Whether a value is one of these, of the same type.

    >>> is_one_of(1, [1, 2]), is_one_of(True, [1, 2])
    (True, False)
    """
    return any(type(other) is type(value) and other == value for other in values)


def integer(low: int, high: int | None = None) -> Check:
    words = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    return lambda value: type(value) is int and low <= value and (high is None or value <= high), words


def number(low: float, high: float) -> Check:
    return lambda value: type(value) in (int, float) and low <= value <= high, f"a number from {low} to {high}"


def a(kind: type | tuple[type, ...], words: str) -> Check:
    return lambda value: isinstance(value, kind), words


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(type(bias) in (int, float) for bias in value.values())


def _is_stream_options(value: Any) -> bool:
    flags = ("include_usage", "continuous_usage_stats")
    return isinstance(value, dict) and all(isinstance(value.get(flag), bool | None) for flag in flags)


def _is_tool_choice(value: Any) -> bool:
    return value in ("none", "auto", "required") if isinstance(value, str) else isinstance(value, dict)


TEXT, FLAG, OBJECT = a(str, "a string"), a(bool, "true or false"), a(dict, "an object")
TEXTS: Check = (lambda value: is_list_of(value, str), "a list of strings")
TOOLS = a(list, "a list of tools")
COMMON: Fields = {
    "model": TEXT,
    "stream": FLAG,
    "stream_options": (_is_stream_options, "an object of true and false"),
    "user": TEXT,
    "metadata": OBJECT,
}
SAMPLING: Fields = {
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "seed": (lambda value: type(value) is int, "an integer"),
    "stop": (lambda value: isinstance(value, str) or is_list_of(value, str), "a string or a list of strings"),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": (_is_bias, "an object of numbers"),
}
"""What OpenAI's APIs have in common, and what may be passed on through each."""
TOOL_USE: Fields = {
    "tool_choice": (_is_tool_choice, "'none', 'auto', 'required' or an object that names a function"),
    "parallel_tool_calls": FLAG,
    "top_logprobs": integer(0, 20),
}
RETURNED: Fields = {"return_token_ids": FLAG, "prompt_logprobs": integer(0)}
"""What vLLM returns beyond OpenAI's APIs."""
NOT_RETURNED: Refusals = {
    "return_token_ids": ((False,), "is for chat completions and completions alone. Leave it out"),
    "prompt_logprobs": ((0, False), "is for chat completions and completions alone. Leave it out"),
}
FUNCTION: Fields = {"description": TEXT, "parameters": OBJECT, "strict": FLAG}
"""A tool that is a function, as OpenAI's APIs describe it."""
