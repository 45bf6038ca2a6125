"""Decorators that make a plugin of one function or class.

    import agl_core

    @agl_core.reward_rule
    def brevity(episode, *, limit: int = 200):
        \"\"\"1 if the answer is short.\"\"\"
        return float(len(str(episode.result)) <= limit)

Name the file in the configuration (`plugins = ["my_rewards.py"]`) and the rule beside it (`[rewards.brevity]`).
Keyword-only parameters are its settings: `[rewards.brevity]` takes `limit`, checked against its type. What needs the
run's folder or seed, or state of its own, is registered with a hook instead (`agl_core.hooks`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, create_model

from agl_core.errors import PluginError
from agl_core.hooks import hookimpl
from agl_core.plugins import DECORATED
from agl_core.protocols import Adapter, Algorithm, GroupRewardRule, RewardValue
from agl_core.registering import Capability
from agl_core.types import CreditKind, Identity, Task

Thing = TypeVar("Thing", bound=Callable[..., Any])
Rewarding = TypeVar("Rewarding", bound=Callable[..., RewardValue | Awaitable[RewardValue]])
Comparing = TypeVar("Comparing", bound=Callable[..., Sequence[RewardValue] | Awaitable[Sequence[RewardValue]]])
Crediting = TypeVar("Crediting", bound=Callable[..., list[list[float]]])
Checking = TypeVar("Checking", bound=Callable[..., str | Awaitable[str | None] | None])
Redacting = TypeVar("Redacting", bound=Callable[..., str])
Making = TypeVar("Making", bound=Callable[..., Algorithm])
Attaching: TypeAlias = Callable[[], Callable[[], Identity | None] | None]
Listing = TypeVar("Listing", bound=Callable[..., Iterable[Task]])
Drawing = TypeVar("Drawing", bound=Callable[..., Task])
Logging = TypeVar("Logging", bound=Callable[..., None])


def options_of(thing: Callable[..., Any]) -> type[BaseModel]:
    """The settings of a function or class: its keyword-only parameters, their annotations and defaults."""
    fields: dict[str, Any] = {
        parameter.name: (
            Any if parameter.annotation is inspect.Parameter.empty else parameter.annotation,
            Field(... if parameter.default is inspect.Parameter.empty else parameter.default),
        )
        for parameter in inspect.signature(thing, eval_str=True).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    return create_model(f"{thing.__name__}_options", __config__=ConfigDict(extra="forbid"), **fields)


class _Bringing:
    """A plugin that implements one hook."""

    def __init__(self, hook: str, implementation: Callable[..., None]) -> None:
        setattr(self, hook, hookimpl(implementation))


def _brought(thing: Thing, hook: str, made: Callable[..., Any], name: str | None, **declared: Any) -> Thing:
    """The function or class itself; `made` makes the component of it, with the settings as keywords."""

    def build(options: BaseModel, *context: Any) -> Any:
        return made(*context, **{setting: getattr(options, setting) for setting in type(options).model_fields})

    def implementation(register: Any) -> None:
        if "options" not in declared:
            declared.update(build=build, options=options_of(thing))
        register(name or thing.__name__, doc=inspect.getdoc(thing), **declared)

    setattr(thing, DECORATED, _Bringing(hook, implementation))
    return thing


def _filled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the rule of a run: the function with its settings filled in."""
    return lambda **settings: functools.partial(function, **settings)


def _bringing(
    function: Any, name: str | None, hook: str, made: Callable[[Any], Callable[..., Any]], **declared: Any
) -> Any:
    """What a decorator returns: the decorated function, or without one, as in `@decorator(name=…)`, the decorator."""

    def decorate(thing: Any) -> Any:
        return _brought(thing, hook, made(thing), name, **declared)

    return decorate if function is None else decorate(function)


def _beside(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with paths that are relative to the configuration's folder."""
    return {name: folder / value.expanduser() if isinstance(value, Path) else value for name, value in settings.items()}


@overload
def reward_rule(function: Rewarding) -> Rewarding: ...
@overload
def reward_rule(*, name: str | None = None, isolated: bool = False) -> Callable[[Rewarding], Rewarding]: ...
def reward_rule(function: Any = None, *, name: str | None = None, isolated: bool = False) -> Any:
    """Make `function(episode, *, settings…)` a reward rule; it may be async.

    It returns the terminal reward; or a mapping, from names to components of it and from `transition.key` to rewards of
    single calls; or None where it has nothing to say about the episode.

    A rule that hands the model's text to code that evaluates it (`eval`, SymPy, a template engine) has to be
    `isolated`: a run calls it in a process without keys, files of the run or network, with limits of time and memory
    (docs/security.md). It must be a function of a module, and not async.
    """
    return _bringing(function, name, "register_rewards", _isolated if isolated else _filled)


def _isolated(function: Callable[..., Any]) -> Callable[..., Any]:
    if "<locals>" in function.__qualname__ or inspect.iscoroutinefunction(function):
        raise PluginError(
            f"The isolated reward rule '{function.__name__}' cannot be called in another process. Make it a function "
            "of its module, not one inside another function, and not async."
        )

    def made(**settings: Any) -> Any:
        from agl_core.sandbox import IsolatedFunction  # Agents' processes need no rules.

        return IsolatedFunction(function, settings)

    return made


@overload
def group_reward_rule(function: Comparing) -> Comparing: ...
@overload
def group_reward_rule(*, name: str) -> Callable[[Comparing], Comparing]: ...
def group_reward_rule(function: Any = None, *, name: str | None = None) -> Any:
    """Make `function(episodes, *, settings…)` a reward rule that sees all episodes of a group; it may be async.

    It returns a list with what a reward rule returns, one for each episode in their order. It gets the episodes that
    the other rules had rewards for, not those that were dropped or have a fixed reward for their ending.
    """

    def made(function: Comparing) -> Callable[..., GroupRewardRule]:
        return lambda **settings: GroupRewardRule(functools.partial(function, **settings))

    return _bringing(function, name, "register_rewards", made, needs={Capability.GROUPS})


def credit_rule(
    *,
    kind: CreditKind | Collection[CreditKind],
    name: str | None = None,
    needs: Iterable[Capability] = (),
    provides: Iterable[Capability] = (),
) -> Callable[[Crediting], Crediting]:
    """Make `function(episodes, *, settings…) -> list[list[float]]` a credit rule.

    It gets one group of episodes and yields one value per transition. `kind` says what the values are:
    `CreditKind.RETURN` or `CreditKind.REWARD`, or both where the algorithm may read them as either. `needs` is what it
    needs of the rest of the run, for instance `Capability.GROUPS`. If tool results count in its values, it provides
    `Capability.TOOL_RESULTS`.
    """
    declared = {"kind": kind, "needs": tuple(needs), "provides": tuple(provides)}
    decorate: Callable[[Crediting], Crediting] = _bringing(None, name, "register_credit_rules", _filled, **declared)
    return decorate


def algorithm(
    *,
    name: str | None = None,
    options: type[BaseModel] | None = None,
    takes: CreditKind | Callable[[Any], CreditKind] | None = CreditKind.RETURN,
    needs: Iterable[Capability] | Callable[[Any], Iterable[Capability]] = (Capability.TOKEN_IDS,),
) -> Callable[[Making], Making]:
    """Make a class an algorithm; its keyword-only parameters are the settings.

    With `options`, a model of the settings, it is called with one instance of that model instead. `takes` says which
    credited values it takes, and `needs` what it needs of the rest of the run; both may be computed from the settings.
    """

    def decorate(thing: Making) -> Making:
        model = {} if options is None else {"options": options, "build": thing}
        return _brought(thing, "register_algorithms", thing, name, takes=takes, needs=needs, **model)

    return decorate


def adapter(
    framework: str, *, name: str | None = None, status_rules: Sequence[Any] = ()
) -> Callable[[Attaching], Adapter]:
    """Make `function()` an adapter, which `agl_core.attach` takes too: it installs the framework's hooks.

    It is called when the module `framework` is imported. Where the framework has no hook around a call, it may return a
    function that says who makes the request that is being sent. `status_rules` (`agl_core.capture.StatusRule`) are the
    words in which the framework tells a model that a tool failed.
    """

    def decorate(function: Attaching) -> Adapter:
        made = _AttachedBy(framework, function)

        def implementation(register: Any) -> None:
            doc = inspect.getdoc(function)
            register(name or function.__name__, lambda options: made, doc=doc, status_rules=status_rules)

        setattr(made, DECORATED, _Bringing("register_adapters", implementation))
        return made

    return decorate


@overload
def task_source(function: Listing) -> Listing: ...
@overload
def task_source(*, name: str) -> Callable[[Listing], Listing]: ...
def task_source(function: Any = None, *, name: str | None = None) -> Any:
    """Make `function(*, settings…) -> Iterable[Task]` a task source; it is called once and lists all tasks.

    Settings of type `Path` are relative to the configuration file.
    """

    def made(function: Listing) -> Callable[..., _ListedTasks]:
        def listed(folder: Path, seed: int, **settings: Any) -> _ListedTasks:
            return _ListedTasks.checked(function.__name__, function(**_beside(folder, settings)))

        return listed

    return _bringing(function, name, "register_task_sources", made)


def endless_task_source(*, name: str | None = None, held_out: int | None = None) -> Callable[[Drawing], Drawing]:
    """Make `function(index, seed, *, settings…) -> Task` a task source; it is called for each task that is needed.

    It must make the same task of the same index and seed, always. `seed` is the run's, so that each run trains on tasks
    of its own. With `held_out`, the function takes the setting `split`: the split `train` has no end, and of every
    other one there are `held_out` tasks, which are the same in all runs (their seed is 0). Settings of type `Path` are
    relative to the configuration file.
    """

    def made(function: Drawing) -> Callable[..., _DrawnTasks]:
        if held_out is not None and "split" not in options_of(function).model_fields:
            raise PluginError(
                f"The task source '{function.__name__}' has held-out tasks, but no setting that says which are wanted. "
                "Give the function the keyword-only parameter 'split'."
            )

        def drawn(folder: Path, seed: int, **settings: Any) -> _DrawnTasks:
            trained = held_out is None or settings["split"] == "train"
            size = None if trained else held_out
            return _DrawnTasks(function, seed if trained else 0, size, _beside(folder, settings))

        return drawn

    decorate: Callable[[Drawing], Drawing] = _bringing(None, name, "register_task_sources", made)
    return decorate


@overload
def tracker(function: Logging) -> Logging: ...
@overload
def tracker(*, name: str) -> Callable[[Logging], Logging]: ...
def tracker(function: Any = None, *, name: str | None = None) -> Any:
    """Make `function(step, metrics, *, settings…)` a tracker; it is called with the metrics of each step."""

    def made(function: Logging) -> Callable[..., _CalledTracker]:
        return lambda run_dir, **settings: _CalledTracker(functools.partial(function, **settings))

    return _bringing(function, name, "register_trackers", made)


@overload
def release_check(function: Checking) -> Checking: ...
@overload
def release_check(*, name: str) -> Callable[[Checking], Checking]: ...
def release_check(function: Any = None, *, name: str | None = None) -> Any:
    """Make `function(release, *, settings…) -> str | None` a check before a version is served; it may be async.

    It says what speaks against the version (`agl_core.protocols.Release`), or None. What it raises does too.
    """
    return _bringing(function, name, "register_release_checks", _filled)


@overload
def redactor(function: Redacting) -> Redacting: ...
@overload
def redactor(*, name: str) -> Callable[[Redacting], Redacting]: ...
def redactor(function: Any = None, *, name: str | None = None) -> Any:
    """Make `function(text, *, settings…) -> str` a redactor: it returns the text of a session as it may be stored.

    A call on whose texts it raises is answered, and not recorded.
    """
    return _bringing(function, name, "register_redactors", _filled)


@dataclass
class _AttachedBy:
    """An adapter of one function."""

    framework: str
    attach: Callable[[], Callable[[], Identity | None] | None]


@dataclass(frozen=True)
class _ListedTasks:
    tasks: tuple[Task, ...]

    @classmethod
    def checked(cls, name: str, found: Iterable[Task]) -> _ListedTasks:
        tasks = tuple(found)
        strange = [each for each in tasks if not isinstance(each, Task)]
        if strange or not tasks:
            what = f"a {type(strange[0]).__name__}" if strange else "nothing"
            raise PluginError(f"The task source '{name}' listed {what}. It must list one agl_core.Task or more.")
        if len({each.id for each in tasks}) < len(tasks):
            raise PluginError(f"The task source '{name}' listed two tasks with one id. Give each an id of its own.")
        return cls(tasks)

    @property
    def size(self) -> int:
        return len(self.tasks)

    def task(self, index: int) -> Task:
        return self.tasks[index]


@dataclass(frozen=True)
class _DrawnTasks:
    function: Callable[..., Any]
    seed: int
    size: int | None
    settings: Mapping[str, Any]

    def task(self, index: int) -> Task:
        task = self.function(index, self.seed, **self.settings)
        if isinstance(task, Task):
            return task
        raise PluginError(
            f"The task source '{self.function.__name__}' made a {type(task).__name__} for index {index}. "
            "It must make an agl_core.Task."
        )


@dataclass(frozen=True)
class _CalledTracker:
    function: Callable[[int, Mapping[str, float]], None]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.function(step, metrics)

    def close(self) -> None:
        """Nothing is kept open."""
