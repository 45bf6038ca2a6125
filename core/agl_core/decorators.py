"""Decorators that make a plugin of one function or class.

    import agl_core

    @agl_core.reward_rule
    def brevity(episode, *, limit: int = 200):
        \"\"\"1 if the answer is short.\"\"\"
        return float(len(str(episode.result)) <= limit)

Name the file in the configuration (`plugins = ["my_rewards.py"]`) and the rule beside it (`[rewards.brevity]`).
Keyword-only parameters are its settings: `[rewards.brevity]` takes `limit`, checked against its type. What needs the
run's folder or seed, or state of its own, is registered by a hook instead (`agl_core.hooks.register_components`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, create_model

from agl_core import kinds
from agl_core.errors import PluginError
from agl_core.kinds import AnyKind, Capability, Register
from agl_core.plugins import DECORATED
from agl_core.protocols import Adapter, Algorithm, GroupRewardRule, RewardValue
from agl_core.types import CreditKind, Identity, Task

RewardFunction = TypeVar("RewardFunction", bound=Callable[..., RewardValue | Awaitable[RewardValue]])
GroupRewardFunction = TypeVar(
    "GroupRewardFunction", bound=Callable[..., Sequence[RewardValue] | Awaitable[Sequence[RewardValue]]]
)
CreditFunction = TypeVar("CreditFunction", bound=Callable[..., list[list[float]]])
AlgorithmClass = TypeVar("AlgorithmClass", bound=Callable[..., Algorithm])
AttachFunction: TypeAlias = Callable[[], Callable[[], Identity | None] | None]
TaskListFunction = TypeVar("TaskListFunction", bound=Callable[..., Iterable[Task]])
TaskFunction = TypeVar("TaskFunction", bound=Callable[..., Task])
LogFunction = TypeVar("LogFunction", bound=Callable[..., None])


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


def _filled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the rule of a run: the function with its settings filled in."""
    return lambda **settings: functools.partial(function, **settings)


def component(
    function: Any,
    kind: AnyKind,
    name: str | None = None,
    make: Callable[[Any], Callable[..., Any]] = _filled,
    options: type[BaseModel] | None = None,
    **declared: Any,
) -> Any:
    """What a decorator of a kind returns: the decorated function, or without one, as in `@decorator(name=…)`, itself.

    `make(function)` makes the component, called with the context of its kind and the settings as keywords. With
    `options`, the decorated thing is the builder.
    """

    def decorate(thing: Any) -> Any:
        product = make(thing)

        def build(options: BaseModel, *context: Any) -> Any:
            return product(*context, **{setting: getattr(options, setting) for setting in type(options).model_fields})

        def bring(register: Register) -> None:
            named, doc = name or thing.__name__, inspect.getdoc(thing)
            if options is not None:
                register(kind, named, thing, options=options, doc=doc, **declared)
            else:  # Only now: annotations of settings may name what the module defines below the function.
                register(kind, named, build, options=options_of(thing), doc=doc, **declared)

        setattr(thing, DECORATED, bring)
        return thing

    return decorate if function is None else decorate(function)


@overload
def reward_rule(function: RewardFunction) -> RewardFunction: ...
@overload
def reward_rule(*, name: str | None = None, isolated: bool = False) -> Callable[[RewardFunction], RewardFunction]: ...
def reward_rule(function: Any = None, *, name: str | None = None, isolated: bool = False) -> Any:
    """Make `function(episode, *, settings…)` a reward rule; it may be async.

    It returns the terminal reward; or a mapping, from names to components of it and from `transition.key` to rewards of
    single calls; or None where it has nothing to say about the episode.

    A rule that hands the model's text to code that evaluates it (`eval`, SymPy, a template engine) has to be
    `isolated`: a run calls it in a process without keys, files of the run or network, with limits of time and memory
    (docs/security.md). It must be a function of a module, and not async.
    """
    return component(function, kinds.REWARD, name, _isolated if isolated else _filled)


def _isolated(function: Callable[..., Any]) -> Callable[..., Any]:
    if "<locals>" in function.__qualname__ or inspect.iscoroutinefunction(function):
        raise PluginError(
            f"The isolated reward rule '{function.__name__}' cannot be called in another process. Make it a function "
            "of its module, not one inside another function, and not async."
        )

    def isolated(**settings: Any) -> Any:
        from agl_core.sandbox import IsolatedFunction  # Agents' processes need no rules.

        return IsolatedFunction(function, settings)

    return isolated


@overload
def group_reward_rule(function: GroupRewardFunction) -> GroupRewardFunction: ...
@overload
def group_reward_rule(*, name: str) -> Callable[[GroupRewardFunction], GroupRewardFunction]: ...
def group_reward_rule(function: Any = None, *, name: str | None = None) -> Any:
    """Make `function(episodes, *, settings…)` a reward rule that sees all episodes of a group; it may be async.

    It returns a list with what a reward rule returns, one for each episode in their order. It gets the episodes that
    the other rules had rewards for, not those that were dropped or have a fixed reward for their ending.
    """

    def make(function: GroupRewardFunction) -> Callable[..., GroupRewardRule]:
        return lambda **settings: GroupRewardRule(functools.partial(function, **settings))

    return component(function, kinds.REWARD, name, make, needs={Capability.GROUPS})


def credit_rule(
    *,
    kind: CreditKind | Collection[CreditKind],
    name: str | None = None,
    needs: Iterable[Capability] = (),
    provides: Iterable[Capability] = (),
) -> Callable[[CreditFunction], CreditFunction]:
    """Make `function(episodes, *, settings…) -> list[list[float]]` a credit rule.

    It gets one group of episodes and yields one value per transition. `kind` says what the values are:
    `CreditKind.RETURN` or `CreditKind.REWARD`, or both where the algorithm may read them as either. `needs` is what it
    needs of the rest of the run, for instance `Capability.GROUPS`. If tool results count in its values, it provides
    `Capability.TOOL_RESULTS`.
    """
    decorate: Callable[[CreditFunction], CreditFunction] = component(
        None, kinds.CREDIT, name, yields=kind, needs=tuple(needs), provides=tuple(provides)
    )
    return decorate


def algorithm(
    *,
    name: str | None = None,
    options: type[BaseModel] | None = None,
    takes: CreditKind | Callable[[Any], CreditKind] | None = CreditKind.RETURN,
    needs: Iterable[Capability] | Callable[[Any], Iterable[Capability]] = (Capability.TOKEN_IDS,),
) -> Callable[[AlgorithmClass], AlgorithmClass]:
    """Make a class an algorithm; its keyword-only parameters are the settings.

    With `options`, a model of the settings, it is called with one instance of that model instead. `takes` says which
    credited values it takes, and `needs` what it needs of the rest of the run; both may be computed from the settings.
    """
    decorate: Callable[[AlgorithmClass], AlgorithmClass] = component(
        None, kinds.ALGORITHM, name, lambda algorithm: algorithm, options=options, takes=takes, needs=needs
    )
    return decorate


def adapter(
    framework: str, *, name: str | None = None, status_rules: Sequence[Any] = ()
) -> Callable[[AttachFunction], Adapter]:
    """Make `function()` an adapter, which `agl_core.attach` takes too: it installs the framework's hooks.

    It is called when the module `framework` is imported. Where the framework has no hook around a call, it may return a
    function that says who makes the request that is being sent. `status_rules` (`agl_core.capture.StatusRule`) are the
    words in which the framework tells a model that a tool failed.
    """

    def decorate(function: AttachFunction) -> Adapter:
        attached = _FunctionAdapter(framework, function)

        def bring(register: Register) -> None:
            doc = inspect.getdoc(function)
            register(
                kinds.ADAPTER, name or function.__name__, lambda options: attached, doc=doc, status_rules=status_rules
            )

        setattr(attached, DECORATED, bring)
        return attached

    return decorate


@overload
def task_source(function: TaskListFunction) -> TaskListFunction: ...
@overload
def task_source(*, name: str) -> Callable[[TaskListFunction], TaskListFunction]: ...
def task_source(function: Any = None, *, name: str | None = None) -> Any:
    """Make `function(*, settings…) -> Iterable[Task]` a task source; it is called once and lists all tasks.

    Settings of type `Path` are relative to the configuration file.
    """

    def make(function: TaskListFunction) -> Callable[..., _ListedTasks]:
        def listed(folder: Path, seed: int, **settings: Any) -> _ListedTasks:
            return _ListedTasks.checked(function.__name__, function(**settings))

        return listed

    return component(function, kinds.TASK_SOURCE, name, make)


def endless_task_source(
    *, name: str | None = None, held_out: int | None = None
) -> Callable[[TaskFunction], TaskFunction]:
    """Make `function(index, seed, *, settings…) -> Task` a task source; it is called for each task that is needed.

    It must make the same task of the same index and seed, always. `seed` is the run's, so that each run trains on tasks
    of its own. With `held_out`, the function takes the setting `split`: the split `train` has no end, and of every
    other one there are `held_out` tasks, which are the same in all runs (their seed is 0). Settings of type `Path` are
    relative to the configuration file.
    """

    def make(function: TaskFunction) -> Callable[..., _DrawnTasks]:
        if held_out is not None and "split" not in options_of(function).model_fields:
            raise PluginError(
                f"The task source '{function.__name__}' has held-out tasks, but no setting that says which are wanted. "
                "Give the function the keyword-only parameter 'split'."
            )

        def drawn(folder: Path, seed: int, **settings: Any) -> _DrawnTasks:
            trained = held_out is None or settings["split"] == "train"
            size = None if trained else held_out
            return _DrawnTasks(function, seed if trained else 0, size, settings)

        return drawn

    decorate: Callable[[TaskFunction], TaskFunction] = component(None, kinds.TASK_SOURCE, name, make)
    return decorate


@overload
def tracker(function: LogFunction) -> LogFunction: ...
@overload
def tracker(*, name: str) -> Callable[[LogFunction], LogFunction]: ...
def tracker(function: Any = None, *, name: str | None = None) -> Any:
    """Make `function(step, metrics, *, settings…)` a tracker; it is called with the metrics of each step."""

    def make(function: LogFunction) -> Callable[..., _CalledTracker]:
        return lambda run_dir, **settings: _CalledTracker(functools.partial(function, **settings))

    return component(function, kinds.TRACKER, name, make)


@dataclass
class _FunctionAdapter:
    """An adapter of one function."""

    framework: str
    attach: AttachFunction


@dataclass(frozen=True)
class _ListedTasks:
    tasks: tuple[Task, ...]

    @classmethod
    def checked(cls, name: str, listed: Iterable[Task]) -> _ListedTasks:
        tasks = tuple(listed)
        wrong = [type(task).__name__ for task in tasks if not isinstance(task, Task)]
        if wrong or not tasks:
            what = f"a {wrong[0]}" if wrong else "nothing"
            raise PluginError(f"The task source '{name}' listed {what}. It must list one agl_core.Task or more.")
        if len({task.id for task in tasks}) < len(tasks):
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
