"""`agl plugins`: what is installed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_core import kinds
from agl_core.cli.screen import AsJson, Screen, print_json
from agl_core.config.resolve import ChosenComponent
from agl_core.errors import nearest
from agl_core.kinds import Component
from agl_core.plugins import Plugins

Files = Annotated[list[Path] | None, typer.Argument(help="Your own plugin files, to list what they bring too.")]
OfKind = Annotated[
    str | None,
    typer.Option(metavar="KIND", help=f"Only components of this kind: {', '.join(kinds.KINDS)}."),
]


def list_plugins(files: Files = None, kind: OfKind = None, as_json: AsJson = False) -> None:
    """List every installed component with its origin, its settings, and what it needs.

    Installed plugins that cannot be used are listed as broken, with the error.
    """
    plugins = Plugins.load(files or ())
    if kind is not None and kind not in kinds.KINDS:
        raise typer.BadParameter(f"There is no kind '{kind}'. {nearest(kind, kinds.KINDS)}")
    described = [
        describe(component)
        for listed in ([kinds.Kind(kind)] if kind else kinds.KINDS)
        for _, component in sorted(plugins.components(listed).items())
    ]
    nothing: dict[str, Any] = {"settings": [], "needs": [], "provides": []}
    for broken in plugins.broken:
        described.append(
            {"kind": "broken", "name": broken.name, "origin": broken.origin, "doc": broken.error, **nothing}
        )
    if as_json:
        print_json(described)
        return
    screen = Screen()
    for row in described:
        screen.print(f"{row['kind']} {row['name']}", style="bold", end="  ")
        screen.print(f"{row['doc']} ({row['origin']})")
        settings = [
            setting["name"] + ("" if setting["required"] else f" = {json.dumps(setting['default'])}")
            for setting in row["settings"]
        ]
        for name, values in (
            ("settings", settings),
            ("needs", ["what its settings say"] if row["needs"] is None else row["needs"]),
            ("provides", row["provides"]),
            *((word, [f"{kind}s" for kind in row.get(word) or ()]) for word in ("takes", "yields")),
        ):
            if values:
                screen.print(f"    {name}: {', '.join(values)}")


def describe(component: Component) -> dict[str, Any]:
    """A component as JSON; `needs` and `takes`, with the default settings, are None if a setting has no default."""
    chosen = ChosenComponent.by_default(component)
    needs: list[str] | None = None
    takes: list[str] | None = None
    with contextlib.suppress(AttributeError):
        needs, takes = sorted(chosen.needs), sorted(chosen.takes)
    schema = component.options.model_json_schema()
    return {
        "kind": component.kind,
        "name": component.name,
        "origin": component.origin,
        "doc": component.summary,
        "settings": [
            {
                "name": name,
                "required": name in schema.get("required", ()),
                "default": setting.get("default"),
                "description": " ".join(setting.get("description", "").split()),
            }
            for name, setting in schema.get("properties", {}).items()
        ],
        "needs": needs,
        "provides": sorted(component.provides),
        **({"takes": takes} if component.kind is kinds.ALGORITHM else {}),
        **({"yields": sorted(chosen.yields)} if component.kind is kinds.CREDIT else {}),
    }
