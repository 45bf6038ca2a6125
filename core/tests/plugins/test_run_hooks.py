"""The hooks that follow a run: plugins compose in their order, and none of them can break the run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agl_core import hookimpl
from agl_core.plugins import Plugins
from agl_core.run_hooks import RunHooks
from agl_core.types import (
    Attempt,
    DropReason,
    Ending,
    Episode,
    FinishReason,
    Mode,
    Rollout,
    Task,
    Transition,
    TransitionKey,
)

ROLLOUT = Rollout(id="r", run="run", restart=0, group="g", member=0, task=Task("t", 0), mode=Mode.TRAIN, step=1)
ATTEMPT = Attempt("r", 0, "w", 0.0, 1.0, Ending.FINISHED)
TRANSITION = Transition(
    key=TransitionKey("r", 0, "c", 0),
    agent=None,
    turn=0,
    agent_turn=0,
    policy="default",
    version=0,
    messages=(),
    response={},
    finish_reason=FinishReason.STOP,
    temperature=1.0,
)
EPISODE = Episode("r", 0, "g", 0, ROLLOUT.task, Mode.TRAIN, Ending.FINISHED, (TRANSITION,))


class Building:
    """A plugin whose `episode_built` is any function."""

    def __init__(self, change: Callable[[Episode], Any]) -> None:
        self.change = change

    @hookimpl
    def episode_built(self, episode: Episode) -> Any:
        return self.change(episode)


def hooks_of(*plugins: object) -> RunHooks:
    found = Plugins()
    for number, plugin in enumerate(plugins):
        found.register(plugin, f"plugin{number}.py")
    return found.hook


def noting(result: str) -> Callable[[Episode], Episode]:
    return lambda episode: replace(episode, result=f"{episode.result or ''}{result}")


def test_each_hook_reaches_every_plugin_with_what_it_asks_for() -> None:
    seen: list[Any] = []

    class Watching:
        @hookimpl
        def rollout_started(self, rollout: Rollout, attempt: int) -> None:
            seen.append((rollout, attempt))

        @hookimpl
        def rollout_finished(self, attempt: Attempt) -> None:
            seen.append(attempt)

        @hookimpl
        def policy_updated(self, policy: str, version: int, metrics: Any) -> None:
            seen.append((policy, version, dict(metrics)))

    hooks = hooks_of(Watching(), Watching())
    hooks.rollout_started(ROLLOUT, 0)
    hooks.rollout_finished(ROLLOUT, ATTEMPT)
    hooks.policy_updated("default", 3, {"loss": 0.5})

    assert seen == [x for each in ((ROLLOUT, 0), ATTEMPT, ("default", 3, {"loss": 0.5})) for x in (each, each)]
    assert hooks.failures == {}


@pytest.mark.parametrize("name", ["rollout_started", "rollout_finished", "policy_updated"])
def test_a_plugin_that_fails_is_named_and_counted_and_the_others_are_called(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fail(self: object) -> None:
        raise RuntimeError("a plugin's mistake")

    fail.__name__ = name
    failing = type("Failing", (), {name: hookimpl(fail)})
    watching = type("Watching", (), {name: hookimpl(lambda self: calls.append(name))})

    arguments: dict[str, tuple[Any, ...]] = {
        "rollout_started": (ROLLOUT, 0),
        "rollout_finished": (ROLLOUT, ATTEMPT),
        "policy_updated": ("default", 1, {}),
    }
    hooks = hooks_of(failing(), watching())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            getattr(hooks, name)(*arguments[name])

    assert calls == [name] * 3
    assert hooks.failures == {("plugin0.py", name): 3}
    assert caplog.text.count("The plugin plugin0.py failed") == 1
    assert "RuntimeError: a plugin's mistake" in caplog.text


def test_metrics_cannot_be_changed_by_a_plugin() -> None:
    class Changing:
        @hookimpl
        def policy_updated(self, metrics: Any) -> None:
            metrics["loss"] = "gone"

    hooks, metrics = hooks_of(Changing()), {"loss": 0.5}
    hooks.policy_updated("default", 1, metrics)

    assert metrics == {"loss": 0.5}
    assert hooks.failures.total() == 1


def test_episode_built_is_a_chain_in_the_order_of_registration() -> None:
    class Last:
        @hookimpl(trylast=True)
        def episode_built(self, episode: Episode) -> Episode:
            return noting("last")(episode)

    hooks = hooks_of(Last(), Building(noting("a")), Building(lambda episode: None), Building(noting("b")))

    assert hooks.episode_built(EPISODE).result == "ablast"


@pytest.mark.parametrize(
    "change",
    [
        lambda episode: replace(episode, dropped=DropReason.STALE),
        lambda episode: replace(episode, dropped=DropReason.PLUGIN),
        lambda episode: replace(episode, transitions=()),
    ],
    ids=["another reason", "its reason", "no transition left"],
)
def test_what_a_plugin_drops_has_its_reason(change: Callable[[Episode], Episode]) -> None:
    hooks = hooks_of(Building(change), Building(noting("seen by the next")))

    left = hooks.episode_built(EPISODE)

    assert (left.dropped, left.result) == (DropReason.PLUGIN, "seen by the next")


def test_a_reason_that_was_there_before_stays() -> None:
    lost = replace(EPISODE, dropped=DropReason.ENDING, transitions=())

    assert hooks_of(Building(noting("x"))).episode_built(lost).dropped is DropReason.ENDING


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda episode: 1 / 0, "ZeroDivisionError"),
        (lambda episode: "an episode", "it must return an Episode or None"),
        (lambda episode: replace(episode, rollout="another"), "of another for one of r"),
    ],
)
def test_an_episode_is_left_as_it_was_by_a_plugin_that_fails(
    change: Callable[[Episode], Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = hooks_of(Building(noting("a")), Building(change), Building(noting("b")))

    assert hooks.episode_built(EPISODE).result == "ab"
    assert hooks.failures == {("plugin1.py", "episode_built"): 1}
    assert said in caplog.text
