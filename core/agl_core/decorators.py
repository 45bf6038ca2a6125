"""Decorators that make a plugin of one function or class.

    import agl_core

    @agl_core.reward_rule
    def brevity(episode, *, limit: int = 200):
        \"\"\"1 if the answer is short.\"\"\"
        return float(len(str(episode.result)) <= limit)

Name the file in the configuration (`plugins = ["my_rewards.py"]`) and the rule beside it (`[rewards.brevity]`).
Keyword-only parameters are its settings: `[rewards.brevity]` takes `limit`, checked against its type. A component that
needs the run's folder or seed, or state of its own, is registered by a hook (`agl_core.hooks.register_components`).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast, overload

from pydantic import BaseModel, ConfigDict, Field, create_model

from agl_core import kinds
from agl_core.errors import PluginError
from agl_core.kinds import Capability, CreditKinds, Kind, Register
from agl_core.plugins import DECORATED
from agl_core.protocols import Adapter, GroupRewardRule
from agl_core.types import CreditKind, Identity, Task

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def component(
    kind: Kind,
    name: str | None = None,
    make: Callable[..., Any] = partial,
    options: type[BaseModel] | None = None,
    **declared: Any,
) -> Callable[[Decorated], Decorated]:
    """A decorator: `make(function, *context, **settings)` makes the component, by default a partial of the function.

    With `options`, the decorated thing is the builder.
    """

    def decorate(thing: Decorated) -> Decorated:
        def build(options: BaseModel, *context: Any) -> Any:
            settings = {name: getattr(options, name) for name in type(options).model_fields}
            return make(thing, *context, **settings)

        def bring(register: Register) -> None:
            # Only now: annotations of settings may name what the module defines below the function.
            builder, settings = (build, _options_of(thing)) if options is None else (thing, options)
            register(kind, name or thing.__name__, builder, options=settings, doc=inspect.getdoc(thing), **declared)

        setattr(thing, DECORATED, bring)
        return thing

    return decorate


def _options_of(thing: Callable[..., Any]) -> type[BaseModel]:
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


@overload
def reward_rule(function: Decorated) -> Decorated: ...
@overload
def reward_rule(*, name: str | None = None, isolated: bool = False) -> Callable[[Decorated], Decorated]: ...
def reward_rule(function: Any = None, *, name: str | None = None, isolated: bool = False) -> Any:
    """Make `function(episode, *, settings…)` a reward rule; it may be async.

    It returns the terminal reward; or a mapping, from names to components of it and from `transition.key` to rewards of
    single calls; or None, if it has nothing to say about the episode.

    A rule that hands the model's text to code that evaluates it (`eval`, SymPy, a template engine) has to be
    `isolated`, a function of a module, and not async: it is called in a process without keys, files of the run or
    network, with limits of time and memory (docs/security.md).
    """
    decorate = component(kinds.REWARD, name, _isolated if isolated else _rule)
    return decorate if function is None else decorate(function)


def _rule(function: Callable[..., Any], _: object, **settings: Any) -> Any:
    return partial(function, **settings)


def _isolated(function: Callable[..., Any], _: object, **settings: Any) -> Any:
    from agl_core.processes.sandbox import IsolatedFunction  # Agents' processes need no rules.

    return IsolatedFunction(function, settings)


def group_reward_rule(function: Decorated) -> Decorated:
    """Make `function(episodes, *, settings…)` a reward rule that sees all episodes of a group; it may be async.

    It returns a list with what a reward rule returns for each episode. Episodes that were dropped, or have a fixed
    reward for their ending, are not among them.
    """

    def make(function: Decorated, _: object, **settings: Any) -> GroupRewardRule:
        return GroupRewardRule(partial(function, **settings))

    return component(kinds.REWARD, None, make, needs={Capability.GROUPS})(function)


def credit_rule(
    *,
    kind: CreditKinds,
    name: str | None = None,
    needs: Collection[Capability] = (),
    provides: Collection[Capability] = (),
) -> Callable[[Decorated], Decorated]:
    """Make `function(episodes, *, settings…) -> list[list[float]]` a credit rule.

    It gets one group of episodes and yields one value per transition, of the `kind` `CreditKind.RETURN`,
    `CreditKind.REWARD` or `CreditKind.ADVANTAGE`, or several if the algorithm may read them as either. `needs` is what
    it needs of the rest of the run, for instance `Capability.GROUPS`. If tool results count in its values, it provides
    `Capability.TOOL_RESULTS`.
    """
    return component(kinds.CREDIT, name, yields=kind, needs=needs, provides=provides)


def algorithm(
    *,
    name: str | None = None,
    options: type[BaseModel] | None = None,
    takes: CreditKinds | Callable[[Any], CreditKinds] = CreditKind.RETURN,
    needs: Collection[Capability] | Callable[[Any], Collection[Capability]] = (Capability.TOKEN_IDS,),
) -> Callable[[Decorated], Decorated]:
    """Make a class, or a function that builds one, an algorithm; its keyword-only parameters are the settings.

    With `options`, a model of the settings, it is called with one instance of that model instead. It `takes` values
    of these kinds (none: rewards mean nothing to it), and `needs` this of the rest of the run; both may be computed
    from the settings.
    """
    return component(kinds.ALGORITHM, name, operator.call, options, takes=takes, needs=needs)


def adapter(
    framework: str, *, name: str | None = None, status_rules: Sequence[Any] = ()
) -> Callable[[Callable[[], Callable[[], Identity | None] | None]], Adapter]:
    """Make `function()`, which installs the framework's hooks, an adapter; `agl_core.attach` takes it too.

    It is called when the module `framework` is imported (see `Adapter.attach`). `status_rules`
    (`agl_core.capture.StatusRule`) are the words in which the framework tells a model that a tool failed.
    """

    def decorate(function: Callable[[], Callable[[], Identity | None] | None]) -> Adapter:
        attached = cast("Adapter", SimpleNamespace(framework=framework, attach=function))

        def bring(register: Register) -> None:
            own_name, doc = name or function.__name__, inspect.getdoc(function)
            register(kinds.ADAPTER, own_name, lambda options: attached, doc=doc, status_rules=status_rules)

        setattr(attached, DECORATED, bring)
        return attached

    return decorate


@overload
def task_source(function: Decorated) -> Decorated: ...
@overload
def task_source(*, name: str) -> Callable[[Decorated], Decorated]: ...
def task_source(function: Any = None, *, name: str | None = None) -> Any:
    """Make `function(*, settings…) -> Iterable[Task]` a task source; it is called once and lists all tasks.

    Settings of type `Path` are relative to the configuration file.
    """
    decorate = component(kinds.TASK_SOURCE, name, _listed)
    return decorate if function is None else decorate(function)


def endless_task_source(*, name: str | None = None, held_out: int | None = None) -> Callable[[Decorated], Decorated]:
    """Make `function(index, seed, *, settings…) -> Task` a task source; it is called for each task that is needed.

    The same index and seed must always make the same task. `seed` is the run's, so that each run trains on tasks of its
    own. With `held_out`, the function takes the setting `split`: `train` has no end, and every other split has
    `held_out` tasks, the same in all runs (their seed is 0). Settings of type `Path` are relative to the configuration
    file.
    """

    def make(function: Callable[..., Any], folder: Path, seed: int, **settings: Any) -> Any:
        is_endless = held_out is None or settings["split"] == "train"

        def task(index: int) -> Task:
            return _checked(function.__name__, function(index, seed if is_endless else 0, **settings))

        return SimpleNamespace(size=None if is_endless else held_out, task=task)

    return component(kinds.TASK_SOURCE, name, make)


def _listed(function: Callable[..., Iterable[Any]], folder: Path, seed: int, **settings: Any) -> Any:
    tasks = tuple(_checked(function.__name__, task) for task in function(**settings))
    if not tasks or len({task.id for task in tasks}) < len(tasks):
        raise PluginError(f"The task source '{function.__name__}' must list tasks, each with an id of its own.")
    return SimpleNamespace(size=len(tasks), task=tasks.__getitem__)


def _checked(source: str, task: Any) -> Task:
    if not isinstance(task, Task):
        raise PluginError(f"The task source '{source}' made a {type(task).__name__}. It must make an agl_core.Task.")
    return task


def tracker(function: Decorated) -> Decorated:
    """Make `function(step, metrics, *, settings…)` a tracker; it is called with the metrics of each step."""

    def make(function: Decorated, run_dir: Path, **settings: Any) -> Any:
        return SimpleNamespace(log=partial(function, **settings), close=lambda: None)  # Nothing is kept open.

    return component(kinds.TRACKER, None, make)(function)
