"""Checking the fields of a request body; what is wrong is named by its place, as `tools[0].name`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import orjson

from agl_core.server.errors import ApiError

Fields: TypeAlias = Mapping[str, tuple[Callable[[Any], bool], str]]
"""By name: whether a value will do, and in words which values do."""

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape in a JSON string; in its group, half of a surrogate pair."""
_DEEPEST = 250
"""Levels of nesting that orjson writes in any case."""


def json_object(raw: bytes) -> dict[str, Any]:
    """A request body as a dict; ApiError 400 if it is none."""
    try:
        body = loads(raw)
        if raw.count(b"{") + raw.count(b"[") > _DEEPEST:
            orjson.dumps(body)  # what is nested more deeply than this can write could not be passed on
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


def check_fields(values: Mapping[str, Any], fields: Fields, place: str = "") -> None:
    """ApiError 400 for the first value that will not do; null means absent."""
    for name, value in values.items():
        if value is not None and name in fields:
            check, expected = fields[name]
            must(check(value), f"{place}{name}", expected, value)


def must(holds: bool, place: str, expected: str, value: object) -> None:
    """ApiError 400 unless it `holds` that the value at this place is as `expected`."""
    if not holds:
        raise wrong(place, f"must be {expected}, not {shown(value)}")


def need(values: Mapping[str, Any], name: str, place: str = "") -> Any:
    """The value of a field that must be there."""
    value = values.get(name)
    if value is None:
        raise wrong(f"{place}{name}", "is missing", code="missing_required_parameter")
    return value


def need_text(values: Mapping[str, Any], name: str, place: str = "") -> str:
    """The text of a field that must be there."""
    value: str = need(values, name, place)
    must(isinstance(value, str), f"{place}{name}", "a string", value)
    return value


def each_object(values: Any, place: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a list, each with its place."""
    must(isinstance(values, list), place, "a list of objects", values)
    placed = [(f"{place}[{index}]", value) for index, value in enumerate(values)]
    for where, value in placed:
        must(isinstance(value, dict), where, "an object", value)
    return placed


def wrong(param: str, problem: str, code: str = "invalid_type") -> ApiError:
    """The refusal of a value that the API itself does not allow."""
    return ApiError(400, f"'{param}' {problem}.", param=param, code=code)


def unsupported(param: str, problem: str) -> ApiError:
    """The refusal of what the API allows and agl cannot do."""
    return wrong(param, problem, code="unsupported_parameter")


def shown(value: object) -> str:
    """A value as an error message shows it."""
    if value is None:
        return "null"
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else text[:57] + "…"


def is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def is_int(low: int, high: int | None = None) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value and (high is None or value <= high)


def is_number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def is_a(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def is_stop(value: Any) -> bool:
    return isinstance(value, str) or is_list_of(value, str)


def is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(type(each) in (int, float) for each in value.values())


def is_stream_options(value: Any) -> bool:
    flags = ("include_usage", "continuous_usage_stats")
    return isinstance(value, dict) and all(isinstance(value.get(flag), bool | None) for flag in flags)


def is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Whether a value is one of these, of the same type.

    >>> is_one_of(1, [1, 2]), is_one_of(True, [1, 2])
    (True, False)
    """
    return any(type(each) is type(value) and each == value for each in values)


SAMPLING: Fields = {
    "temperature": (is_number(0, 2), "a number from 0 to 2"),
    "top_p": (is_number(0, 1), "a number from 0 to 1"),
    "seed": (lambda value: type(value) is int, "an integer"),
    "stop": (is_stop, "a string or a list of strings"),
    "presence_penalty": (is_number(-2, 2), "a number from -2 to 2"),
    "frequency_penalty": (is_number(-2, 2), "a number from -2 to 2"),
    "logit_bias": (is_bias, "an object of numbers"),
}
"""What OpenAI's APIs have in common, and what may be passed on through each."""

COMMON: Fields = {
    "model": (is_a(str), "a string"),
    "stream": (is_a(bool), "true or false"),
    "stream_options": (
        is_stream_options,
        "an object of true and false",
    ),
    "user": (is_a(str), "a string"),
    "metadata": (is_a(dict), "an object"),
}

RETURNED: Fields = {
    "return_token_ids": (is_a(bool), "true or false"),
    "prompt_logprobs": (is_int(0), "an integer of at least 0"),
}
"""What vLLM returns beyond OpenAI's APIs."""

FUNCTION: Fields = {
    "description": (is_a(str), "a string"),
    "parameters": (is_a(dict), "an object"),
    "strict": (is_a(bool), "true or false"),
}
"""A tool that is a function, as OpenAI's APIs describe it."""
