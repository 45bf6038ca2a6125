"""Which recorded rollouts another configuration is tried on."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from agl_core.analysis.rollouts import superseded
from agl_core.capture import load_episodes
from agl_core.config import CONFIG_FILE, LoadedConfig
from agl_core.errors import ConfigError, StoreRefusedError, nearest
from agl_core.store.interface import Store
from agl_core.types import Ending, Episode, Mode, Rollout, RolloutState
from agl_core.wire.keys import SERVER_FILE


def chosen_episodes(file: Path, ids: Sequence[str], step: int | None) -> list[Episode]:
    """The episodes of a file to try."""
    every = load_episodes(file)
    groups = {episode.group for episode in every}

    def is_named(episode: Episode, name: str) -> bool:
        return episode.group == name if name in groups else episode.rollout.startswith(name)

    for each in ids:
        if not any(is_named(episode, each) for episode in every):
            raise ConfigError(f"{file} has no episode '{each}'. {_close(each, [e.rollout for e in every])}")
    chosen = [e for e in every if (not ids or any(is_named(e, each) for each in ids)) and step in (None, e.step)]
    if not chosen:
        raise ConfigError(f"{file} has no episode" + ("." if step is None else f" of step {step}."))
    return chosen


def run_of(file: Path, loaded: LoadedConfig) -> Path:
    """The run that has this file as its configuration, else the newest of the configuration's name."""
    runs, name = loaded.config.runs, loaded.config.name
    if file.name == CONFIG_FILE and any((file.parent / made).exists() for made in ("store.sqlite", SERVER_FILE)):
        return file.parent
    of_name = re.compile(re.escape(name) + r"(-\d+)?")
    folders = [path.parent for path in runs.glob(f"*/{CONFIG_FILE}")]
    found = [folder for folder in folders if of_name.fullmatch(folder.name)]
    if not found:
        raise ConfigError(
            f"There is no run '{name}' below {runs}. {nearest(name, (folder.name for folder in folders))} "
            f"Name a run's folder with --run, or train first: agl train {file}."
        )
    return max(found, key=lambda folder: (folder / CONFIG_FILE).stat().st_mtime)


async def chosen_rollouts(store: Store, folder: Path, ids: Sequence[str], step: int | None) -> list[Rollout]:
    """The rollouts to try."""
    if step is not None and not ids:
        of_step, runs = await store.rollouts(step=step, mode=Mode.TRAIN), await store.runs()
        chosen = [r for r in of_step if not superseded(r, runs)]
        if chosen and _complete(chosen):
            return chosen
    if ids:
        named = [r for each in ids for r in await _named(store, folder, each)]
        return list({r.id: r for r in named}.values())
    recorded = await store.rollouts()
    every = [r for r in recorded if r.mode.trains]
    if step is None and recorded and not every:
        return [r for r in recorded if r.state is RolloutState.DONE and r.counted_attempt is not None]
    runs = await store.runs()
    by_step: dict[int, list[Rollout]] = {}
    for rollout in every:
        if not superseded(rollout, runs):
            by_step.setdefault(rollout.step, []).append(rollout)
    if step is not None:
        if step not in by_step:
            steps = f"{min(by_step)} to {max(by_step)}" if by_step else "none"
            raise ConfigError(f"{folder} has no training rollouts of step {step}. Its training steps: {steps}.")
        chosen = by_step[step]
        if not _complete(chosen):
            raise ConfigError(
                f"Step {step} of {folder} did not come to its end. Wait for it, choose an earlier step, or name "
                f"rollouts that are done: agl rollouts {folder} --step {step}."
            )
        return chosen
    complete = [number for number, of_step in by_step.items() if _complete(of_step)]
    if not complete:
        raise ConfigError(f"{folder} has no training step that came to its end. See agl rollouts {folder}.")
    return by_step[max(complete)]


def _complete(rollouts: Sequence[Rollout]) -> bool:
    return all(r.state is RolloutState.DONE and r.ending is not Ending.CANCELLED for r in rollouts)


async def _named(store: Store, folder: Path, prefix: str) -> list[Rollout]:
    """The rollouts of a group, or the one, that the user names; ConfigError says why it cannot be tried."""
    runs = await store.runs()
    members = await store.rollouts(group=prefix)
    of_group = [r for r in members if not superseded(r, runs) and r.counted_attempt is not None]
    if of_group:
        return of_group
    try:
        found = await store.rollout(prefix)
    except StoreRefusedError:
        known = [r.id for r in await store.rollouts()]
        if any(id.startswith(prefix) for id in known):
            raise
        raise ConfigError(
            f"{folder} has no rollout '{prefix}'. {_close(prefix, known)}See agl rollouts {folder}."
        ) from None
    if found.state is not RolloutState.DONE:
        raise ConfigError(f"{found.id} is not done, it is {found.state.value}. Try it when it is, or name another.")
    if found.counted_attempt is None:
        ending = found.ending.value if found.ending else "stopped"
        raise ConfigError(f"{found.id} never finished (it was {ending}), so there is nothing to score. Name another.")
    return [found]


def _close(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}? " if near else ""
