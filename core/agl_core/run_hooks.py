"""Calling the hooks that follow a run: plugins compose, and what one of them raises cannot break the run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pluggy

from agl_core.types import Attempt, DropReason, Episode, Rollout

logger = logging.getLogger(__name__)


class RunHooks:
    """Calls each hook of all plugins, in the order in which they were registered.

    An exception in one is logged with the plugin's name and counted; the others are called all the same.
    """

    def __init__(self, manager: pluggy.PluginManager, origin_of: Callable[[object], str]) -> None:
        self._manager, self._origin_of = manager, origin_of
        self.failures: Counter[tuple[str, str]] = Counter()
        """By plugin and hook, how often it failed."""

    def rollout_started(self, rollout: Rollout, attempt: int) -> None:
        """A worker took a rollout."""
        self._call("rollout_started", rollout=rollout, attempt=attempt)

    def rollout_finished(self, rollout: Rollout, attempt: Attempt) -> None:
        """An attempt ended."""
        self._call("rollout_finished", rollout=rollout, attempt=attempt)

    def policy_updated(self, policy: str, version: int, metrics: Mapping[str, Any]) -> None:
        """A policy was updated."""
        self._call("policy_updated", policy=policy, version=version, metrics=MappingProxyType(dict(metrics)))

    def episode_built(self, episode: Episode) -> Episode:
        """The episode as the plugins leave it; each gets what the one before it returned."""
        for hook in self._implementations("episode_built"):
            with self._guard(hook):
                episode = _as_left(episode, _returned(hook, episode=episode))
        return episode

    def _call(self, name: str, **arguments: object) -> None:
        for hook in self._implementations(name):
            with self._guard(hook):
                _returned(hook, **arguments)

    def _implementations(self, name: str) -> list[pluggy.HookImpl]:
        """In the order of registration, but for those that ask to be first or last."""
        found = getattr(self._manager.hook, name).get_hookimpls()
        return sorted(found, key=lambda each: each.trylast - each.tryfirst)

    @contextmanager
    def _guard(self, hook: pluggy.HookImpl) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            failed = self._origin_of(hook.plugin), hook.function.__name__
            self.failures[failed] += 1
            if self.failures[failed] == 1:
                logger.warning(
                    "The plugin %s failed in %s: %r. The run goes on without it; further failures are only counted.",
                    *failed,
                    error,
                    exc_info=error,
                )


def _returned(hook: pluggy.HookImpl, **arguments: object) -> object:
    """What the hook returns; it gets the arguments that it asks for by name."""
    return hook.function(**{name: arguments[name] for name in hook.argnames})


def _as_left(before: Episode, found: object) -> Episode:
    """What a plugin returned, with the reason for which it dropped the episode, if it did."""
    if found is None:
        return before
    if not isinstance(found, Episode):
        raise TypeError(f"episode_built returned {type(found).__name__}; it must return an Episode or None")
    if (found.rollout, found.attempt, found.group) != (before.rollout, before.attempt, before.group):
        raise ValueError(f"episode_built returned an episode of {found.rollout} for one of {before.rollout}")
    dropped = found.dropped not in (None, before.dropped)
    emptied = bool(before.transitions) and not found.transitions and found.dropped is None
    return replace(found, dropped=DropReason.PLUGIN) if dropped or emptied else found
