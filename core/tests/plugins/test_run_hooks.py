"""The hooks that follow a run: plugins compose in their order, and none of them can break the run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agl_core import hookimpl
from agl_core.plugins import Plugins, RunHooks
from agl_core.testing import episodes as make
from agl_core.types import DropReason, Episode

EPISODE = make.episode(make.transition())
CALLS: dict[str, tuple[Any, ...]] = {
    "server_routes": (None, None),
    "rollout_started": (make.rollout(), 0),
    "rollout_finished": (make.rollout(), make.attempt()),
    "policy_updated": ("default", 3, {"loss": 0.5}),
}


def plugin(hook: str, function: Callable[..., Any], **options: Any) -> object:
    """A plugin of one hook, called with what the function's parameters ask for."""
    function.__name__ = hook
    return type("Plugin", (), {hook: staticmethod(hookimpl(**options)(function))})()


def building(change: Callable[[Episode], Any], **options: Any) -> object:
    return plugin("episode_built", lambda episode: change(episode), **options)


def noting(result: str) -> Callable[[Episode], Episode]:
    return lambda episode: replace(episode, result=f"{episode.result or ''}{result}")


def hooks_of(*plugins: object) -> RunHooks:
    registered = Plugins()
    for number, plugin in enumerate(plugins):
        registered.register(plugin, f"plugin{number}.py")
    return registered.hook


@pytest.mark.parametrize("hook", CALLS)
def test_a_plugin_that_fails_is_named_and_counted_and_the_others_are_called(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    hooks = hooks_of(plugin(hook, lambda: 1 / 0), plugin(hook, lambda: calls.append(hook)))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            getattr(hooks, hook)(*CALLS[hook])
    assert calls == [hook] * 3
    assert hooks.failures == {("plugin0.py", hook): 3}
    assert caplog.text.count("The plugin plugin0.py failed") == 1
    assert "ZeroDivisionError" in caplog.text


def test_each_hook_reaches_a_plugin_with_what_it_asks_for_and_nothing_can_be_changed() -> None:
    seen: list[Any] = []
    hooks = hooks_of(
        plugin("rollout_started", lambda rollout, attempt: seen.append((rollout, attempt))),
        plugin("rollout_finished", lambda attempt: seen.append(attempt)),
        plugin("policy_updated", lambda policy, version, metrics: seen.append((policy, version, dict(metrics)))),
        plugin("policy_updated", lambda metrics: metrics.clear()),
    )
    for hook, arguments in CALLS.items():
        getattr(hooks, hook)(*arguments)
    assert seen == [CALLS["rollout_started"], CALLS["rollout_finished"][1], CALLS["policy_updated"]]
    assert hooks.failures == {("plugin3.py", "policy_updated"): 1}, "metrics are read-only"


def test_episode_built_is_a_chain_in_the_order_of_registration() -> None:
    hooks = hooks_of(
        building(noting("last"), trylast=True),
        *(building(change) for change in (noting("a"), lambda episode: None, noting("b"))),
    )
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
    episode = hooks_of(building(change), building(noting("seen by the next"))).episode_built(EPISODE)
    assert (episode.dropped, episode.result) == (DropReason.PLUGIN, "seen by the next")
    lost = replace(EPISODE, dropped=DropReason.ENDING, transitions=())
    assert hooks_of(building(noting("x"))).episode_built(lost).dropped is DropReason.ENDING


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda episode: 1 / 0, "ZeroDivisionError"),
        (lambda episode: "an episode", "it must return an Episode or None"),
        (lambda episode: replace(episode, rollout="another"), "of another for one of r"),
    ],
)
def test_an_episode_is_left_as_it_was_by_a_plugin_that_fails(
    change: Callable[[Episode], Any], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = hooks_of(building(noting("a")), building(change), building(noting("b")))
    assert hooks.episode_built(EPISODE).result == "ab"
    assert hooks.failures == {("plugin1.py", "episode_built"): 1}
    assert problem in caplog.text
