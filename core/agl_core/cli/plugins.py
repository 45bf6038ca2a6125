"""`agl plugins`: the installed components, with their origin, settings, needs and capabilities."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from agl_core import kinds
from agl_core.cli.options import AsJson
from agl_core.cli.screen import Screen, print_json
from agl_core.errors import nearest
from agl_core.plugins import BrokenPlugin, Component, Plugins

Files = Annotated[list[Path] | None, typer.Argument(help="Your own plugin files, to list what they bring too.")]


def _kind(word: str) -> kinds.AnyKind:
    by_word = {kind.word: kind for kind in kinds.KINDS}
    if word not in by_word:
        raise typer.BadParameter(f"There is no kind '{word}'. {nearest(word, by_word)}")
    return by_word[word]


OfKind = Annotated[
    kinds.AnyKind | None,
    typer.Option(
        parser=_kind, metavar="KIND", help=f"Only components of this kind: {', '.join(map(str, kinds.KINDS))}."
    ),
]


def list_plugins(files: Files = None, kind: OfKind = None, as_json: AsJson = False) -> None:
    """List every installed component with its origin, its settings, and what it needs.

    Installed plugins that cannot be used are listed as broken, with the error.
    """
    plugins = Plugins.load(files or ())
    described = [
        describe(component)
        for listed in ([kind] if kind else plugins.kinds)
        for _, component in sorted(plugins.components(listed).items())
    ]
    described += [_describe_broken(plugin) for plugin in plugins.broken]
    if as_json:
        print_json(described)
    else:
        Screen().print(_table(described))


def describe(component: Component) -> dict[str, Any]:
    """A component as JSON; `needs` and `takes` (with the default settings) are None where a setting has no default."""
    defaults = component.options.model_construct()
    needs: list[str] | None = None
    takes: str | None = None
    with contextlib.suppress(AttributeError):
        needs, takes = sorted(component.needs(defaults)), component.takes(defaults)
    schema = component.options.model_json_schema()
    return {
        "kind": component.kind.word,
        "name": component.name,
        "origin": component.origin,
        "doc": component.doc,
        "settings": [
            {
                "name": field.alias or name,
                "required": field.is_required(),
                "default": schema["properties"][field.alias or name].get("default"),
                "description": field.description or "",
            }
            for name, field in component.options.model_fields.items()
        ],
        "needs": needs,
        "provides": sorted(component.provides),
        **({"takes": takes} if component.kind is kinds.ALGORITHM else {}),
        **({"yields": sorted(component.yields)} if component.kind is kinds.CREDIT else {}),
    }


def _describe_broken(plugin: BrokenPlugin) -> dict[str, Any]:
    """A broken plugin in the form of a component."""
    nothing: dict[str, Any] = {"settings": [], "needs": [], "provides": []}
    return {"kind": "broken", "name": plugin.name, "origin": plugin.origin, "doc": plugin.error, **nothing}


def _table(described: list[dict[str, Any]]) -> Table:
    """Three columns, so that it fits a narrow terminal."""
    titles = ("kind, name, from", "honours", "needs and provides")
    table = Table(*(Column(title, overflow="fold") for title in titles), show_lines=True)
    for row in described:
        settings = [
            setting["name"] + ("" if setting["required"] else f" = {json.dumps(setting['default'])}")
            for setting in row["settings"]
        ]
        capabilities = [
            *(f"needs {need}" for need in (["what its settings say"] if row["needs"] is None else row["needs"])),
            *(f"provides {capability}" for capability in row["provides"]),
            *([f"takes {row['takes']}s"] if row.get("takes") else []),
            *(f"yields {kind}s" for kind in row.get("yields", ())),
        ]
        table.add_row(
            Text.assemble(f"{row['kind']} ", (row["name"], "bold"), f"\n{row['origin']}\n", (row["doc"], "dim")),
            "\n".join(settings),
            "\n".join(capabilities),
        )
    return table
