"""Finding the plugins that a configuration names, and checking the settings it has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic_core import to_jsonable_python

from agl_core.config.models import PluginChoice, RewardSection, TaskSection
from agl_core.config.problems import Place, Report
from agl_core.errors import nearest
from agl_core.plugins import Component, Kind, Plugins


@dataclass(frozen=True, eq=False)
class Chosen:
    """A component that the configuration chose, with its settings."""

    component: Component
    options: BaseModel

    def build(self, *context: Any) -> Any:
        """Make it; `context` is what its kind's hook says beyond the options."""
        return self.component.build(self.options, *context)

    @property
    def label(self) -> str:
        """For messages: kind, name and origin."""
        return label(self.component)


def label(component: Component) -> str:
    """A component for messages: kind, name and origin."""
    return f"{component.kind} '{component.name}' ({component.origin})"


class Resolver:
    """Looks up and validates, section by section; what is wrong goes to the report.

    Each method returns the section with the settings as validated (defaults filled in), so that the resolved
    configuration says everything, and what it chose. Parts that are wrong are missing from both.
    """

    def __init__(self, plugins: Plugins, report: Report) -> None:
        self._plugins, self._report = plugins, report

    def choice(self, kind: Kind, key: str, section: PluginChoice) -> tuple[PluginChoice, Chosen | None]:
        """A section that chooses one plugin by `name`; tables for other installed ones may stand beside it."""
        known = self._plugins.components(kind)
        tables = {key_inside: value for key_inside, value in section.tables.items() if isinstance(value, dict)}
        for stray in section.tables.keys() - tables.keys():
            self._report.add((key, stray), f"there is no such key here; settings stand in [{key}.{section.name}].")
        if section.name in known:
            tables.setdefault(section.name, {})
        else:
            self._unknown(kind, section.name, (key, "name"))
            tables.pop(section.name, None)
        found = {name: self._chosen(kind, name, settings, (key, name)) for name, settings in tables.items()}
        settings = {name: settings_of(chosen.options) for name, chosen in found.items() if chosen}
        return PluginChoice(name=section.name, **settings), found.get(section.name)

    def tasks(self, sections: Mapping[str, TaskSection]) -> tuple[dict[str, TaskSection], dict[str, Chosen]]:
        """The sets of tasks."""
        resolved, found = dict(sections), {}
        for name, section in sections.items():
            place: Place = ("tasks", name)
            chosen = self._chosen(
                Kind.TASK_SOURCE, section.source, section.settings, place, named_by="source", reserved=TaskSection
            )
            if chosen:
                found[name] = chosen
                resolved[name] = TaskSection(source=section.source, **settings_of(chosen.options))
        return resolved, found

    def rewards(self, sections: Mapping[str, RewardSection]) -> tuple[dict[str, RewardSection], dict[str, Chosen]]:
        """The reward rules."""
        resolved, found = dict(sections), {}
        for name, section in sections.items():
            chosen = self._chosen(
                Kind.REWARD,
                section.rule or name,
                section.settings,
                ("rewards", name),
                named_by="rule" if section.rule else None,
                reserved=RewardSection,
            )
            if chosen:
                found[name] = chosen
                resolved[name] = RewardSection(rule=section.rule, weight=section.weight, **settings_of(chosen.options))
        return resolved, found

    def trackers(
        self, sections: Mapping[str, Mapping[str, Any]], *, must_exist: bool
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Chosen]]:
        """The trackers; of those that nobody asked for (`must_exist` is False), the installed ones."""
        known = self._plugins.components(Kind.TRACKER)
        wanted = {name: settings for name, settings in sections.items() if must_exist or name in known}
        found = {
            name: chosen
            for name, settings in wanted.items()
            if (chosen := self._chosen(Kind.TRACKER, name, settings, ("trackers", name)))
        }
        return {name: settings_of(chosen.options) for name, chosen in found.items()}, found

    def _chosen(
        self,
        kind: Kind,
        name: str,
        settings: Mapping[str, Any],
        place: Place,
        *,
        named_by: str | None = None,
        reserved: type[BaseModel] | None = None,
    ) -> Chosen | None:
        component = self._plugins.components(kind).get(name)
        if component is None:
            self._unknown(kind, name, (*place, named_by) if named_by else place)
            return None
        clash = set(reserved.model_fields) & set(component.options.model_fields) if reserved else set()
        if clash:
            self._report.add(place, f"{label(component)} calls a setting {clash}, which means something else here.")
            return None
        options = self._report.validated(component.options, settings, place, label(component))
        return Chosen(component, options) if options is not None else None

    def _unknown(self, kind: Kind, name: str, place: Place) -> None:
        known = self._plugins.components(kind)
        self._report.add(place, f"there is no {kind} '{name}'. {nearest(name, known)} `agl plugins` lists them all.")


def settings_of(options: BaseModel) -> dict[str, Any]:
    """Settings as the file would have them; without secrets, and without what TOML cannot say (None)."""
    plain = options.model_dump(by_alias=True, exclude_none=True)
    return {key: to_jsonable_python(value) for key, value in _without_secrets(plain).items()}


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_secrets(inside)
            for key, inside in value.items()
            if not isinstance(inside, (SecretStr, SecretBytes))
        }
    if isinstance(value, (list, tuple)):
        return [_without_secrets(inside) for inside in value if not isinstance(inside, (SecretStr, SecretBytes))]
    return value
