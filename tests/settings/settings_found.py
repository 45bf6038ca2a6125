"""Every setting that agl accepts, by name: what the configuration's models and the installed components say."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from agl_core import kinds
from agl_core.config.models import RunConfig
from agl_core.plugins import Plugins

TABLE = "NAME"
"""Stands for the name of a table that the user chooses: `policies.NAME.optimizer.schedule`."""


def every_setting(plugins: Plugins) -> list[str]:
    """The keys of a run, and `KIND.COMPONENT.SETTING` for each setting of each component."""
    settings = list(settings_of(RunConfig))
    for kind in kinds.KINDS:
        for name, component in plugins.components(kind).items():
            above = name if kind is kinds.SECTION else f"{kind.replace(' ', '_')}.{name}"
            settings += settings_of(component.options, above)
    return settings


def settings_of(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """The settings of a model, those of the models inside it included."""
    for name, field in model.model_fields.items():
        yield from _inside(field.annotation, f"{above}.{field.alias or name}" if above else field.alias or name)


def _inside(annotation: Any, name: str) -> Iterator[str]:
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            yield from settings_of(member, name)
            return
        if get_origin(member) in (dict, Mapping):
            key, value = get_args(member)
            if isinstance(key, type) and issubclass(key, Enum):
                yield from (f"{name}.{choice.value}" for choice in key)
                return
            if isinstance(value, type) and issubclass(value, BaseModel):
                yield name  # Which tables there are is a setting too.
                yield from settings_of(value, f"{name}.{TABLE}")
                return
    yield name


def _members(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _members(argument)
    elif origin is Annotated:
        yield from _members(get_args(annotation)[0])
    else:
        yield annotation
