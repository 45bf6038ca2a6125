"""Writes docs/configuration.md from the configuration's own types and the installed plugins' settings.

`python docs/make_configuration.py` writes it, `--check` fails if it is not up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated import check_apps, write_or_check
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from agl_core import kinds
from agl_core.config.models import RunConfig
from agl_core.config.sections import PluginChoice, Section
from agl_core.plugins import Plugins

OUT = Path(__file__).with_name("configuration.md")
HEAD = """# The configuration file

A run is one TOML file. Paths are relative to it. `--set KEY=VALUE` overrides a key, `--seed` the seed. Unknown keys,
wrong types and combinations that cannot work are refused before anything starts, all at once, with the nearest valid
names. The resolved file, with every default filled in, is stored with the run.

`make docs` generates this page from the types that check the file. `examples/calc/train.toml` is an example with
comments.
"""
PLUGINS_HEAD = """
## Settings of plugins

`[algorithm]`, `[credit]`, `[buffer]`, `[engine]` and `[store]` choose a plugin by `name`. Its settings are in a table
of that name (`[algorithm.grpo]`). A file may keep the tables of several plugins: one line switches between them. Task
sources and reward rules have their settings beside `source` and `rule`. `agl plugins` lists what is installed.
"""


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a field holds, through optionals and tables of tables."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from models_in(argument)


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    if isinstance(value, PluginChoice):
        return f"`{value.name}`"
    if isinstance(value, BaseModel):
        return ""
    plain = to_jsonable_python(value)
    return "absent" if plain is None else f"`{json.dumps(plain)}`"


def escaped(text: str) -> str:
    """Text that may stand in a cell of a table."""
    return text.replace("|", "\\|")


def table(model: type[BaseModel]) -> list[str]:
    """One row per key."""
    rows = [
        f"| `{field.alias or name}` | {default_of(field)} | {escaped(field.description or '')} |"
        for name, field in model.model_fields.items()
        if not any(issubclass(found, Section) for found in models_in(field.annotation)) or field.description
    ]
    return ["| key | default | |", "|---|---|---|", *rows, ""] if rows else []


def sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Every table of the file, by its dotted name."""
    yield path, model
    for name, field in model.model_fields.items():
        many = "dict[" in str(field.annotation)
        for found in models_in(field.annotation):
            key = field.alias or name
            below = f"{path}.{key}" if path else key
            yield from sections(found, f"{below}.NAME" if many else below)


def render() -> str:
    """The whole page."""
    lines = [HEAD]
    plugins = Plugins.load()
    of_plugins = plugins.components(kinds.SECTION).items()
    tables = [*sections(RunConfig, ""), *(each for name, found in of_plugins for each in sections(found.options, name))]
    for path, model in tables:
        rows = table(model)
        if rows and path not in ("credit", "algorithm", "buffer", "engine", "store"):
            lines += [f"## `[{path}]`" if path else "## At the top of the file", "", (model.__doc__ or "").strip(), ""]
            lines += rows
    lines.append(PLUGINS_HEAD)
    for kind in (kind for kind in plugins.kinds if kind is not kinds.SECTION):
        for component in sorted(plugins.components(kind).values(), key=lambda each: each.name):
            if component.origin.startswith("agl-"):
                package = component.origin.split()[0]
                lines += [
                    f"### {kind} `{component.name}` ({package})",
                    "",
                    component.doc,
                    "",
                    *table(component.options),
                ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    check_apps()
    sys.exit(write_or_check(OUT, render()))
