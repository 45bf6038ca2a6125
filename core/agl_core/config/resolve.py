"""Finding the plugins that a configuration names, checking the settings it has for them, and saying what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError
from pydantic_core import ErrorDetails, to_jsonable_python

from agl_core import kinds
from agl_core.config.models import AgentSection, MixtureOptions, RunConfig
from agl_core.config.sections import HUB_NAME, ModelPlace, OpenSection, PluginChoice, PolicySection
from agl_core.errors import AglError, ConfigError, PluginError, last_frames, nearest
from agl_core.kinds import Capability, Component, CreditKinds, Kind
from agl_core.plugins import Plugins
from agl_core.types import CreditKind

Model = TypeVar("Model", bound=BaseModel)

Place: TypeAlias = tuple[str | int, ...]
"""Keys of tables, and indices of lists."""


@dataclass(frozen=True, eq=False)
class ChosenComponent:
    component: Component
    options: BaseModel
    """Checked, with absolute paths."""

    @classmethod
    def by_default(cls, component: Component) -> ChosenComponent:
        """With its default settings; one without a default is missing."""
        return cls(component, component.options.model_construct())

    def build(self, *context: Any) -> Any:
        """Make it of its options and its kind's `context`; PluginError if that fails."""
        try:
            return self.component.build(self.options, *context)
        except (AglError, ModuleNotFoundError):  # The command line says what to install.
            raise
        except Exception as error:
            raise PluginError(
                f"{self.label} cannot be made ({type(error).__name__}: {error}). Fix it, or leave it out.\n"
                f"{last_frames(error)}"
            ) from error

    @property
    def label(self) -> str:
        return self.component.label

    @property
    def needs(self) -> frozenset[Capability]:
        needs = self.component.needs
        return frozenset(needs(self.options) if callable(needs) else needs)

    @property
    def takes(self) -> frozenset[CreditKind]:
        return self._kinds(self.component.takes)

    @property
    def yields(self) -> frozenset[CreditKind]:
        return self._kinds(self.component.yields)

    def _kinds(self, declared: CreditKinds | Callable[[Any], CreditKinds]) -> frozenset[CreditKind]:
        kinds = declared(self.options) if callable(declared) else declared
        return frozenset({kinds} if isinstance(kinds, CreditKind) else kinds)


@dataclass(frozen=True, eq=False)
class PolicyPlan:
    algorithm: ChosenComponent
    credit: ChosenComponent

    @property
    def credit_kind(self) -> CreditKind:
        """The kind of the credited values: of several the one that the algorithm takes; returns if it takes none."""
        return min(self.algorithm.takes & self.credit.yields or {CreditKind.RETURN})


@dataclass(frozen=True, eq=False)
class LoadedConfig:
    """A configuration, read and resolved, with the components that it chose.

    Parts that were not needed may be missing: tables are empty, and `engine` and `store` raise ConfigError.
    """

    config: RunConfig
    """With defaults of plugins' settings, without secrets, and with paths as written; `folder` is absolute."""
    plugins: Plugins
    is_whole: bool
    """True if everything that it names was needed."""
    single: Mapping[str, ChosenComponent | None]
    """By kind, where a run has one component of it."""
    policies: Mapping[str, PolicyPlan]
    tasks: Mapping[str, ChosenComponent]
    rewards: Mapping[str, ChosenComponent]
    """By the name of the table, which need not be the rule's."""
    trackers: Mapping[str, ChosenComponent]
    sections: Mapping[str, ChosenComponent]

    @property
    def engine(self) -> ChosenComponent:
        return self._one(kinds.ENGINE)

    @property
    def store(self) -> ChosenComponent:
        return self._one(kinds.STORE)

    def _one(self, kind: Kind) -> ChosenComponent:
        chosen = self.single[kind]
        if chosen is None:
            raise ConfigError(f"[{kind}] name: {self.plugins.unknown(kind, getattr(self.config, kind).name)}")
        return chosen

    @property
    def imitates(self) -> bool:
        """True if all policies imitate recorded replies, without rewards or log-probabilities."""
        return all(Capability.DEMONSTRATIONS in plan.algorithm.needs for plan in self.policies.values())

    @property
    def trains_on_texts(self) -> bool:
        """True if no policy's algorithm asks for the log-probabilities of recorded replies."""
        return all(Capability.RECORDED_TEXTS in plan.algorithm.component.provides for plan in self.policies.values())

    @property
    def compares(self) -> bool:
        """True if a rule or an algorithm compares several rollouts of each task; what is imitated is not compared."""
        trained_by = (part for plan in self.policies.values() for part in (plan.algorithm, plan.credit))
        compared = any(Capability.GROUPS in part.needs for part in (*trained_by, *self.rewards.values()))
        return compared and not self.imitates

    @property
    def is_rewarded(self) -> bool:
        """True if a policy's algorithm takes credited values; otherwise rewards mean nothing to training."""
        return any(plan.algorithm.takes for plan in self.policies.values())

    def weights(self, policy: str) -> str:
        """The initial weights of a policy: an absolute folder, or a hub name. ConfigError if that folder is gone."""
        path = self.config.policies[policy].model.path
        local = below(self.config.folder, Path(path))
        if local.is_dir():
            return str(local)
        if not HUB_NAME.fullmatch(path) or local.exists():
            raise ConfigError(
                f"[policies.{policy}.model] path: there is no folder {local}, and '{path}' is not a hub name like "
                f"'Qwen/Qwen2.5-0.5B-Instruct'. If the weights were moved, say where they are: "
                f"--set policies.{policy}.model.path=FOLDER."
            )
        return path


def resolve(config: RunConfig, plugins: Plugins, report: Problems, needs: Collection[Kind]) -> LoadedConfig:
    """The configuration with every setting filled in, and its components; `report` gets what is broken and needed."""
    find = _Resolver(plugins, config.folder, report, needs)
    single = dict[str, ChosenComponent | None]()
    for kind in (kinds.ENGINE, kinds.ALGORITHM, kinds.CREDIT, kinds.STORE):
        single[kind] = chosen = find.choice(kind, (kind,), getattr(config, kind))
        if kind == kinds.ENGINE and chosen is not None:
            find.defaults = chosen.component.defaults
    policies = find.policies(config.policies, single[kinds.ALGORITHM], single[kinds.CREDIT])
    tasks = find.tables(kinds.TASK_SOURCE, "source", ("tasks",), config.tasks)
    rewards = find.tables(kinds.REWARD, "rule", ("rewards",), config.rewards)
    trackers, sections = find.trackers(config.trackers), find.sections(config.model_extra or {})
    find.harness(config.agent)
    data: Any = config.as_file()
    for (*above, name), settings in find.settings.items():
        table = data
        for part in above:
            table = table[part]
        if settings is None:
            table.pop(name, None)
        else:
            table[name] = settings
    resolved, is_whole = type(config).model_validate(data), needs is kinds.KINDS
    return LoadedConfig(resolved, plugins, is_whole, single, policies, tasks, rewards, trackers, sections)


class _Resolver:
    """Finds and validates the component that each section chooses."""

    def __init__(self, plugins: Plugins, folder: Path, report: Problems, needs: Collection[Kind]) -> None:
        self._plugins, self._folder, self._needed, self._needs = plugins, folder, report, needs
        self.defaults: Mapping[str, Any] = {}
        """The engine's own, for settings of algorithms."""
        self.settings: dict[Place, Mapping[str, Any] | None] = {}
        """Tables of plugins for the resolved file, by place; None: the plugin is not installed."""

    def _report(self, kind: Kind) -> Problems:
        """Collects problems with components of a kind; discards them if none is needed."""
        return self._needed if kind in self._needs else Problems(Path())

    def choice(self, kind: Kind, place: Place, section: PluginChoice) -> ChosenComponent | None:
        """The plugin that a section chooses by `name`; tables for other installed ones may stand beside its own."""
        tables = {key: value for key, value in section.settings.items() if isinstance(value, dict)}
        own = (*place, section.name)
        for stray in section.settings.keys() - tables.keys():
            table = ".".join(map(str, own))
            self._report(kind).add((*place, stray), f"there is no such key here; settings stand in [{table}].")
        chosen = self._chosen(kind, section.name, tables.pop(section.name, {}), own, (*place, "name"))
        for name, settings in tables.items():
            self._chosen(kind, name, settings, (*place, name))
        return chosen

    def policies(
        self, sections: Mapping[str, PolicySection], algorithm: ChosenComponent | None, credit: ChosenComponent | None
    ) -> dict[str, PolicyPlan]:
        """The plan of each policy; `algorithm` and `credit` are the run's."""
        plans = {}
        for name, section in sections.items():
            learns_by, credited_by = (
                of_run if (own := getattr(section, kind)) is None else self.choice(kind, ("policies", name, kind), own)
                for kind, of_run in ((kinds.ALGORITHM, algorithm), (kinds.CREDIT, credit))
            )
            if learns_by is not None and credited_by is not None:
                plans[name] = PolicyPlan(learns_by, credited_by)
        return plans

    def tables(
        self, kind: Kind, named_by: str, place: Place, tables: Mapping[str, OpenSection]
    ) -> dict[str, ChosenComponent]:
        """The plugins of tables, each named by its key `named_by`, or else by the table's name."""
        plugins = {}
        for name, table in tables.items():
            own, here = table.model_dump(mode="json", include=set(type(table).model_fields)), (*place, name)
            named_at = (*here, named_by) if own[named_by] else here
            if plugin := self._chosen(kind, own[named_by] or name, table.settings, here, named_at, own):
                plugins[name] = plugin
        return plugins

    def sections(self, tables: Mapping[str, Any]) -> dict[str, ChosenComponent]:
        known, sections = self._plugins.components(kinds.CONFIG_TABLE), {}
        for name, settings in tables.items():
            self.settings[(name,)] = None
            if name not in known:
                report = self._report(kinds.CONFIG_TABLE) if isinstance(settings, dict) else self._needed
                report.add((name,), f"there is no such key. {nearest(name, [*names_at(RunConfig, ()), *known])}")
            elif not isinstance(settings, dict):
                self._needed.add((name,), "must be a table.")
            elif chosen := self._chosen(kinds.CONFIG_TABLE, name, settings, (name,)):
                sections[name] = chosen
        return sections

    def harness(self, agent: AgentSection | None) -> None:
        if agent is not None and agent.harness is not None:
            self._chosen(kinds.HARNESS, agent.harness, agent.options or {}, ("agent", "options"), ("agent", "harness"))

    def trackers(self, sections: Mapping[str, Mapping[str, Any] | Literal[False]]) -> dict[str, ChosenComponent]:
        """The trackers of the sections, but for those that are False, and TensorBoard if it is installed."""
        trackers = {}
        installed = self._plugins.components(kinds.TRACKER)
        by_default: Mapping[str, Any] = {"tensorboard": {}} if "tensorboard" in installed else {}
        for name, settings in {**by_default, **sections}.items():
            if settings is not False and (tracker := self._chosen(kinds.TRACKER, name, settings, ("trackers", name))):
                trackers[name] = tracker
        return trackers

    def _chosen(
        self,
        kind: Kind,
        name: str,
        settings: Mapping[str, Any],
        place: Place,
        named_at: Place | None = None,
        own: Mapping[str, Any] = MappingProxyType({}),
    ) -> ChosenComponent | None:
        """The plugin of this name; at the place of its settings, the keys `own` are the table's."""
        self.settings[place] = own or None
        component = self._plugins.components(kind).get(name)
        if component is None:
            text = f"{self._plugins.unknown(kind, name)} `agl plugins` lists them all."
            self._report(kind).add(named_at or place, text)
            return None
        if clash := own.keys() & component.options.model_fields.keys():
            text = f"{component.label} calls a setting {clash}, which means something else here."
            self._report(kind).add(place, text)
            return None
        if kind == kinds.ALGORITHM:
            defaults = {key: value for key, value in self.defaults.items() if key in component.options.model_fields}
            settings = {**defaults, **settings}
        options = self._report(kind).validated(component.options, settings, place, component.label)
        if options is None:
            return None
        self.settings[place] = {**own, **settings_of(options)}
        if isinstance(options, MixtureOptions):
            parts = self.tables(kind, "source", (*place, "parts"), options.parts)
            needs = frozenset(need for part in parts.values() for need in part.needs)
            component = replace(component, build=partial(component.build, parts=parts), needs=needs)
        return ChosenComponent(component, with_absolute_paths(options, self._folder))


def below(folder: Path, path: Path) -> Path:
    """A path of the configuration, absolute; a relative one starts at `folder`."""
    return (folder / path.expanduser()).resolve()


def with_absolute_paths(value: Any, folder: Path) -> Any:
    """A setting, or a model of settings, with absolute paths; relative ones start at `folder`."""
    match value:
        case Path():
            return below(folder, value)
        case ModelPlace():
            local = below(folder, Path(value))
            return ModelPlace(local) if local.is_dir() else value
        case BaseModel():
            given = {name: getattr(value, name) for name in type(value).model_fields}
            resolved = {name: with_absolute_paths(inside, folder) for name, inside in given.items()}
            return value.model_copy(update={name: path for name, path in resolved.items() if path != given[name]})
        case dict():
            return {key: with_absolute_paths(inside, folder) for key, inside in value.items()}
        case list() | tuple() | set() | frozenset():
            return type(value)(with_absolute_paths(inside, folder) for inside in value)
    return value


def settings_of(options: Any) -> Any:
    """Settings as a file has them, without secrets and None, which TOML cannot say."""
    if isinstance(options, BaseModel):
        options = options.model_dump(by_alias=True, exclude_none=True)
    if isinstance(options, dict):
        kept = {key: inside for key, inside in options.items() if not isinstance(inside, SecretStr | SecretBytes)}
        return {key: settings_of(inside) for key, inside in kept.items()}
    if isinstance(options, list | tuple):
        return [settings_of(inside) for inside in options if not isinstance(inside, SecretStr | SecretBytes)]
    return to_jsonable_python(options)


def written(place: Place) -> str:
    """A place as messages show it.

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


class Problems:
    """Collects what is wrong, so that one error lists all of it."""

    def __init__(self, path: Path, overridden: Collection[Place] = ()) -> None:
        self._path, self._overridden = path, overridden
        self._lines: list[str] = []
        self.hint = ""
        """Another possible explanation."""

    def add(self, place: Place, text: str) -> None:
        is_override = any(place[: len(key)] == key for key in self._overridden)
        line = f"{written(place)}: {text}" if place else text
        self._lines.append(line + (" (It comes from --set.)" if is_override else ""))

    def validated(
        self, model: type[Model], data: Mapping[str, Any], above: Place = (), owner: str | None = None
    ) -> Model | None:
        """`data` as `model`; None if it has problems, which are added, such as keys that the model would ignore.

        The rules are JSON's: a list can be a tuple and a text a path, but no text becomes a number.
        """
        forbid = model.model_config.get("extra") in (None, "ignore")
        text = json.dumps(data, default=str)
        try:
            return model.model_validate_json(text, strict=True, extra="forbid" if forbid else None)
        except ValidationError as error:
            by_place: dict[Place, list[ErrorDetails]] = {}
            for details in error.errors(include_url=False):
                by_place.setdefault(_place_in(data, details), []).append(details)
            for place, errors in by_place.items():
                self.add((*above, *place), _text(errors, model, place, owner))
            return None

    def raise_if_any(self) -> None:
        """ConfigError with one line per problem, if there is one."""
        hint = [self.hint] if self.hint else []
        if len(self._lines) == 1:
            raise ConfigError("\n  ".join([f"{self._path}: {self._lines[0]}", *hint]))
        if self._lines:
            raise ConfigError("\n  ".join([f"{self._path} has {len(self._lines)} problems:", *self._lines, *hint]))


def _place_in(data: Any, details: ErrorDetails) -> Place:
    """pydantic's location, without the tags that it adds for members of unions and for keys of dicts."""
    place: list[str | int] = []
    here = data
    for part in details["loc"]:
        inside = part in here if isinstance(here, dict) else isinstance(here, list) and part in range(len(here))
        if inside:
            here = here[part]
            place.append(part)
    return (*place, details["loc"][-1]) if details["type"] == "missing" else tuple(place)


def _text(errors: Sequence[ErrorDetails], model: type[BaseModel], place: Place, owner: str | None) -> str:
    """pydantic's errors about one place, in the words of the file: it says "Input should …", "String should …"."""
    first = errors[0]
    match first["type"]:
        case "extra_forbidden":
            problem = f"{owner} does not honour it" if owner else "there is no such key"
            return f"{problem}. {nearest(str(place[-1]), names_at(model, place[:-1]))}"
        case "missing":
            return "is missing."
        case "value_error":
            return f"{first['msg'].removeprefix('Value error, ').rstrip('.')}."
    expected = " or ".join(dict.fromkeys(re.sub(r"^\w+ should ", "", details["msg"]) for details in errors))
    given = json.dumps(first["input"], default=str)
    return f"must {expected}, not {given if len(given) <= 60 else given[:60] + '…'}."


def names_at(model: type[BaseModel], place: Place) -> list[str]:
    """The keys that a model knows at a place inside it.

    >>> from agl_core.config.models import RunConfig
    >>> names_at(RunConfig, ("agent",)), names_at(RunConfig, ("policies", "default", "model", "lora"))
    (['entry', 'command', 'harness', 'options', 'attach'], ['rank', 'alpha', 'targets'])
    """
    for part in place:
        fields = (field for name, field in model.model_fields.items() if part in (name, field.alias))
        model = next((inside for field in fields for inside in models_in(field.annotation)), model)
    return [described.alias or name for name, described in model.model_fields.items()]


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field may hold, through optionals and tables of tables."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)
