"""Writes docs/configuration.md and docs/cli.md from the configuration's types, the installed plugins and the commands,
and README's blocks of output (see make_readme.py).

`python docs/make_reference.py` writes them, `--check` fails if one is not up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer.main
from make_readme import ROOT, readme
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

DOCS = Path(__file__).parent
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
CLI_HEAD = """# The command line

What `agl COMMAND --help` says in the terminal, on one page. Options of every command stand before it:
`agl --debug train train.toml` shows the traceback of an error, `agl --version` prints the version. Plugins can add
commands; `agl plugins` lists them.

`make docs` generates this page from the commands.
"""


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
    return text.replace("|", "\\|")


def _table(rows: Mapping[str, str]) -> list[str]:
    return ["| key | default | |", "|---|---|---|", *rows.values(), ""] if rows else []


def tables(model: type[BaseModel], path: str = "", about: str = "") -> Iterator[str]:
    """The lines of a table of the file and of those inside it."""
    rows = rows_of(model)
    if rows:
        yield from (f"## `[{path}]`" if path else "## At the top of the file", "", (model.__doc__ or "").strip(), "")
        if about:
            yield from (about, "")
        yield from _table(rows)
    for name, field in model.model_fields.items():
        key = f"{path}.{field.alias or name}".removeprefix(".")
        for inside in models_in(field.annotation) if is_table(field) else ():
            is_named = "dict[" in str(field.annotation)
            yield from tables(inside, f"{key}.NAME" if is_named else key, field.description or "")


def settings(component: Component, shown: dict[str, str]) -> Iterator[str]:
    """A component's settings; those that one of its kind above has too are only named. `shown` says whose they are."""
    assert component.doc, f"{component.kind} {component.name} has no description"
    rows = rows_of(component.options)
    common = [key for key, row in rows.items() if row in shown]
    yield from (f"### {component.kind} `{component.name}` ({component.origin.split()[0]})", "", component.doc, "")
    yield from _table({key: row for key, row in rows.items() if key not in common})
    if common:
        owner = shown[rows[common[0]]]
        yield from (f"Also, as of `{owner}`: {', '.join(f'`{key}`' for key in common)}.", "")
    for row in rows.values():
        shown.setdefault(row, component.name)


def configuration() -> str:
    """The whole page."""
    plugins = Plugins.load()
    lines = [HEAD, *tables(RunConfig)]
    for name, section in plugins.components(kinds.SECTION).items():
        lines += tables(section.options, name)
    lines.append(PLUGINS_HEAD)
    for kind in kinds.KINDS:
        shown: dict[str, str] = {}
        for component in sorted(plugins.components(kind).values(), key=lambda component: component.name):
            if component.origin.startswith("agl-") and kind is not kinds.SECTION:
                lines += settings(component, shown)
    return "\n".join(lines).rstrip() + "\n"


def cli() -> str:
    """The whole page."""
    add_installed(app)
    group: Any = typer.main.get_command(app)
    context = group.make_context("agl", [], resilient_parsing=True)
    parts = [CLI_HEAD]
    for name in group.list_commands(context):
        _, command, _ = group.resolve_command(context, [name])
        parts.append(get_docs_for_click(obj=command, ctx=context, name=name, call_prefix="agl", indent=1).strip())
    return "\n\n".join(parts) + "\n"


def main() -> None:
    for folder in sorted((DOCS.parent / "apps").iterdir()):
        try:
            version(f"agl-{folder.name}")
        except PackageNotFoundError:  # The pages would be made without its commands and settings.
            sys.exit(f"agl-{folder.name} is not installed: {sys.executable} -m pip install --no-deps -e {folder}")
    front = ROOT / "README.md"
    pages = {DOCS / "configuration.md": configuration(), DOCS / "cli.md": cli(), front: readme(front.read_text())}
    for page, text in pages.items():
        if "--check" not in sys.argv[1:]:
            page.write_text(text)
        elif page.read_text() != text:
            sys.exit(f"{page.name} is not up to date: make docs")


if __name__ == "__main__":
    main()
