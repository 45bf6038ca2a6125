"""What is wrong with a configuration, one line per problem: where, what, and the nearest valid names."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agl_core.errors import ConfigError, nearest

Model = TypeVar("Model", bound=BaseModel)

Place: TypeAlias = tuple[str | int, ...]
"""Where a value stands: keys of tables, and indices of lists."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{written(self.place)}: {self.text}" if self.place else self.text


def written(place: Place) -> str:
    """A place as it looks in the file.

    >>> written(("train", "steps")), written(("eval", "modes", 0)), written(("name",))
    ('[train] steps', '[eval] modes[0]', 'name')
    """
    keys: list[str] = []
    for part in place:
        if isinstance(part, int) and keys:
            keys[-1] += f"[{part}]"
        else:
            keys.append(str(part))
    *table, key = keys
    return f"[{'.'.join(table)}] {key}" if table else key


class Report:
    """Collects what is wrong, so that one error lists all of it."""

    def __init__(self, path: Path, overridden: Collection[Place] = ()) -> None:
        self._path, self._overridden = path, overridden
        self._problems: list[Problem] = []
        self.hint = ""
        """What else may explain the problems."""

    def add(self, place: Place, text: str) -> None:
        self._problems.append(Problem(place, text))

    def validated(
        self, model: type[Model], data: Mapping[str, Any], above: Place = (), owner: str | None = None
    ) -> Model | None:
        """`data` as `model`, or None and the problems noted.

        The rules are JSON's: a list can be a tuple and a text a path, but no text becomes a number. No key is
        ignored, even if a plugin's model would ignore it.
        """
        forbid = model.model_config.get("extra") in (None, "ignore")
        text = json.dumps(data, default=str)
        try:
            return model.model_validate_json(text, strict=True, extra="forbid" if forbid else None)
        except ValidationError as error:
            self._problems += _problems_of(error, model, data, above, owner)
            return None

    def raise_if_any(self) -> None:
        """ConfigError with one line per problem, if there is one."""
        lines = [f"{problem}{self._source(problem.place)}" for problem in self._problems]
        hint = [self.hint] if self.hint else []
        if len(lines) == 1:
            raise ConfigError("\n  ".join([f"{self._path}: {lines[0]}", *hint]))
        if lines:
            raise ConfigError("\n  ".join([f"{self._path} has {len(lines)} problems:", *lines, *hint]))

    def _source(self, place: Place) -> str:
        is_override = any(place[: len(key)] == key for key in self._overridden)
        return " (It comes from --set.)" if is_override else ""


def _problems_of(
    error: ValidationError, model: type[BaseModel], data: Any, above: Place, owner: str | None
) -> list[Problem]:
    """pydantic's errors about `data`, in the words of the file."""
    by_place: dict[Place, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_place.setdefault(_place_in(data, details), []).append(details)
    return [Problem((*above, *place), _text(details, model, place, owner)) for place, details in by_place.items()]


def _place_in(data: Any, details: ErrorDetails) -> Place:
    """pydantic's location, without the tags that it adds for members of unions and for keys of dicts."""
    place: list[str | int] = []
    here = data
    for part in details["loc"]:
        inside = part in here if isinstance(here, dict) else isinstance(here, list) and part in range(len(here))
        if inside:
            here = here[part]
            place.append(part)
    if details["type"] == "missing":
        place.append(details["loc"][-1])
    return tuple(place)


def _text(errors: Sequence[ErrorDetails], model: type[BaseModel], place: Place, owner: str | None) -> str:
    first = errors[0]
    given = first["input"]
    match first["type"]:
        case "extra_forbidden":
            return f"{f'{owner} does not honour it' if owner else 'there is no such key'}. " + nearest(
                str(place[-1]), names_at(model, place[:-1])
            )
        case "missing":
            description = _description(model, place)
            return f"is missing{f': {description}' if description else '.'}"
        case "value_error":
            return _sentence(first["msg"].removeprefix("Value error, "))
        case "enum" | "literal_error" if len(errors) == 1 and isinstance(given, str):
            allowed = re.findall(r"'([^']*)'", str(first.get("ctx", {}).get("expected", "")))
            is_key = first["loc"][-1] == "[key]"
            return f"{'there is no such key' if is_key else f'cannot be {given!r}'}. {nearest(given, allowed)}"
    expected = " or ".join(dict.fromkeys(_expectation(details) for details in errors))
    return _sentence(f"must {expected.replace(' or be ', ' or ')}, not {_shortened(given)}")


def _expectation(details: ErrorDetails) -> str:
    """What follows "must"; pydantic says "Input should …", "String should …"."""
    match details["type"]:
        case "model_type" | "dict_type":
            return "be a table"
        case "list_type" | "tuple_type" | "set_type":
            return "be a list"
    return re.sub(r"^\w+ should ", "", details["msg"])


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _shortened(value: Any) -> str:
    text = "true" if value is True else "false" if value is False else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _description(model: type[BaseModel], place: Place) -> str | None:
    for parent in _models(_annotation_at(model, place[:-1])):
        field = parent.model_fields.get(str(place[-1]))
        if field is not None and field.description:
            return field.description
    return None


def names_at(model: type[BaseModel], place: Place) -> list[str]:
    """The keys that a model knows at a place inside it.

    >>> from agl_core.config.models import RunConfig
    >>> names_at(RunConfig, ("agent",))
    ['entry', 'command', 'attach']
    """
    return [
        field.alias or name
        for parent in _models(_annotation_at(model, place))
        for name, field in parent.model_fields.items()
    ]


def _annotation_at(annotation: Any, place: Place) -> Any:
    for part in place:
        annotation = next(iter(_inside(annotation, part)), None)
    return annotation


def _inside(annotation: Any, part: str | int) -> Iterator[Any]:
    """What a value of this type holds under a key or index."""
    for member in _members(annotation):
        origin, arguments = get_origin(member), get_args(member)
        if isinstance(member, type) and issubclass(member, BaseModel):
            for name, field in member.model_fields.items():
                if part in (name, field.alias):
                    yield field.annotation
        elif isinstance(origin, type) and issubclass(origin, Mapping):
            yield arguments[1]
        elif isinstance(part, int) and arguments:
            yield arguments[0]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    return (each for each in _members(annotation) if isinstance(each, type) and issubclass(each, BaseModel))


def _members(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _members(argument)
    elif origin is Annotated:
        yield from _members(get_args(annotation)[0])
    else:
        yield annotation
