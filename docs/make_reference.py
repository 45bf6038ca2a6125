"""Writes docs/configuration.md, docs/cli.md and the alarms of docs/health.md from the configuration's types, the
installed plugins, the commands and the table of alarms, and README's blocks of output (see make_readme.py).

`python docs/make_reference.py` writes them, `--check` fails if one is not up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from inspect import cleandoc
from pathlib import Path
from typing import Any

import typer.main
from make_readme import readme, replaced
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python
from typer.cli import get_docs_for_click

from agl_core import kinds
from agl_core.cli import add_installed, app
from agl_core.config.models import RunConfig
from agl_core.config.resolve import models_in
from agl_core.config.sections import PluginChoice
from agl_core.kinds import Component
from agl_core.plugins import Plugins
from agl_server.health.table import ALARMS

DOCS = Path(__file__).parent


def is_table(field: FieldInfo) -> bool:
    """True if it is no key but a table, which has a part of the page of its own."""
    return any(not issubclass(model, PluginChoice) for model in models_in(field.annotation))


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    if isinstance(value, PluginChoice):
        return f"`{value.name}`"
    plain = to_jsonable_python(value)
    return "absent" if plain is None else f"`{json.dumps(plain)}`"


def rows_of(model: type[BaseModel]) -> dict[str, str]:
    """One row per key, each of which must have a description."""
    rows = {}
    for name, field in model.model_fields.items():
        if not is_table(field):
            assert field.description, f"{model.__name__}.{name} has no description"
            key = field.alias or name
            rows[key] = f"| `{key}` | {default_of(field)} | {_cell(field.description)} |"
    return rows


def _cell(text: str) -> str:
    """Text that may stand in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _table(rows: Mapping[str, str]) -> list[str]:
    return ["| key | default | |", "|---|---|---|", *rows.values(), ""] if rows else []


def tables(model: type[BaseModel], path: str = "", about: str = "") -> Iterator[str]:
    """The lines of a table of the file and of those inside it."""
    rows = rows_of(model)
    if rows:
        yield from (f"## `[{path}]`" if path else "## At the top of the file", "", cleandoc(model.__doc__ or ""), "")
        if about:
            yield from (about, "")
        yield from _table(rows)
    for name, field in model.model_fields.items():
        key = f"{path}.{field.alias or name}".removeprefix(".")
        for inside in models_in(field.annotation) if is_table(field) else ():
            is_named = "dict[" in str(field.annotation)
            yield from tables(inside, f"{key}.NAME" if is_named else key, " ".join((field.description or "").split()))


def settings(component: Component, shown: dict[str, str]) -> Iterator[str]:
    """A component's settings; those that one of its kind above has too are only named. `shown` says whose they are."""
    assert component.summary, f"{component.kind} {component.name} has no description"
    rows = rows_of(component.options)
    common = [key for key, row in rows.items() if row in shown]
    yield from (f"### {component.kind} `{component.name}` ({component.origin.split()[0]})", "", component.summary, "")
    yield from _table({key: row for key, row in rows.items() if key not in common})
    if common:
        owner = shown[rows[common[0]]]
        yield from (f"Also, as of `{owner}`: {', '.join(f'`{key}`' for key in common)}.", "")
    for name, field in component.options.model_fields.items():
        for inside in models_in(field.annotation) if is_table(field) else ():
            yield from (f"Each of its tables `{name}.NAME`:", "", *_table(rows_of(inside)))
    for row in rows.values():
        shown.setdefault(row, component.name)


def configuration(page: str) -> str:
    """The page with its tables written anew."""
    plugins = Plugins.load()
    own, of_plugins = list(tables(RunConfig)), list[str]()
    for name, section in plugins.components(kinds.CONFIG_TABLE).items():
        own += tables(section.options, name)
    for kind in kinds.KINDS:
        shown: dict[str, str] = {}
        for component in sorted(plugins.components(kind).values(), key=lambda component: component.name):
            if component.origin.startswith("agl-") and kind is not kinds.CONFIG_TABLE:
                of_plugins += settings(component, shown)
    return _written(_written(page, "tables", "\n".join(own)), "plugins", "\n".join(of_plugins))


def cli(page: str) -> str:
    """The page with its commands written anew."""
    add_installed(app)
    group: Any = typer.main.get_command(app)
    context = group.make_context("agl", [], resilient_parsing=True)
    parts = []
    for name in group.list_commands(context):
        _, command, _ = group.resolve_command(context, [name])
        parts.append(get_docs_for_click(obj=command, ctx=context, name=name, call_prefix="agl", indent=1).strip())
    return _written(page, "commands", "\n\n".join(parts))


def health(page: str) -> str:
    """The page with its table of alarms written anew."""
    rows = [f"| `{name}` | {_cell(facts.about)} | {_cell(facts.remedy)} |" for name, facts in ALARMS.items()]
    head = "| alarm | raised when, and why it matters | what to do |\n|---|---|---|"
    return _written(page, "alarms", "\n".join([head, *rows]))


def _written(page: str, section: str, text: str) -> str:
    return replaced(page, f"docs/make_reference.py, {section}", f"\n{text.rstrip()}\n")


def main() -> None:
    for folder in sorted((DOCS.parent / "apps").iterdir()):
        try:
            version(f"agl-{folder.name}")
        except PackageNotFoundError:  # The pages would be made without its commands and settings.
            sys.exit(f"agl-{folder.name} is not installed: {sys.executable} -m pip install --no-deps -e {folder}")
    for name, write in (
        ("docs/configuration.md", configuration),
        ("docs/cli.md", cli),
        ("docs/health.md", health),
        ("README.md", readme),
    ):
        page = DOCS.parent / name
        text = write(page.read_text())
        if "--check" not in sys.argv[1:]:
            page.write_text(text)
        elif page.read_text() != text:
            sys.exit(f"{name} is not up to date: make docs")


if __name__ == "__main__":
    main()
