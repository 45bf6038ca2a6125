"""Every setting that agl accepts, by name: what the configuration's models and the installed components say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, get_args, get_origin

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
            above = name if kind is kinds.CONFIG_TABLE else f"{kind.replace(' ', '_')}.{name}"
            settings += settings_of(component.options, above)
    return settings


def settings_of(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """The settings of a model, those of the models inside it included."""
    for name, field in model.model_fields.items():
        key = f"{above}.{field.alias or name}".removeprefix(".")
        yield from _inside(field.annotation, key) or [key]


def _inside(annotation: Any, name: str) -> list[str]:
    """The settings of the model or the tables that a field holds; none if it holds a plain value."""
    arguments = get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return list(settings_of(annotation, name))
    if get_origin(annotation) not in (dict, Mapping):
        return next(filter(None, (_inside(argument, name) for argument in arguments)), [])
    if isinstance(arguments[0], type) and issubclass(arguments[0], Enum):
        return [f"{name}.{choice.value}" for choice in arguments[0]]
    inside = _inside(arguments[1], f"{name}.{TABLE}")
    return [name, *inside] if inside else []  # Which tables there are is a setting too.
