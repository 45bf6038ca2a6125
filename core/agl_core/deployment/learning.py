"""A run that learns from its own use: its versions answer sessions, and its trainer learns from them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from agl_core.config.load import CONFIG_FILE, LoadedConfig, store_config
from agl_core.deployment.learner import Learner
from agl_core.deployment.ledger import Ledger
from agl_core.deployment.serving import DeployedVersions
from agl_core.errors import ConfigError
from agl_core.store.files import is_written
from agl_core.training.checkpoints import CHECKPOINTS, Checkpoints, read_state
from agl_core.training.progress import Observer
from agl_core.training.run import train
from agl_core.training.run_folder import make_run_dir
from agl_core.training.summary import Summary

_STORE = "store.sqlite"


async def learn(loaded: LoadedConfig, run_dir: Path, observer: Observer) -> Summary:
    """Serve a run's versions and learn from their sessions; a run that was begun goes on from its last checkpoint.

    A run that was never deployed begins with its last checkpoint, or with what training started from, as its stable
    version. ConfigError without `[learn]`, or if another process has the run.
    """
    if loaded.config.learn is None:
        raise ConfigError(
            "There is no [learn] in the configuration, so nothing is learned from sessions. Add it and [online] "
            "(docs/deploy-and-learn.md), or train on tasks: agl train."
        )
    if is_written(run_dir / _STORE):
        raise ConfigError(
            f"Another process has the run {run_dir}: a run has one learner, which also serves it. Stop that one first, "
            f"or give this run another name (--set name=ANOTHER)."
        )
    if not (run_dir / CONFIG_FILE).exists():
        make_run_dir(run_dir, partial(store_config, loaded.config))
    checkpoints = Checkpoints(run_dir / CHECKPOINTS, keep=1).all()
    step = read_state(checkpoints[-1]).step if checkpoints else 0
    ledger = Ledger.of_run(run_dir)
    for policy in loaded.policies:
        ledger.begin(policy, step, "It is what the run was deployed with.")
    async with DeployedVersions(run_dir, loaded.config, observer.say) as deployed:
        return await train(
            loaded,
            run_dir,
            observer,
            resume=(run_dir / _STORE).exists(),
            deployed=deployed,
            trainer_of=partial(Learner, deployed=deployed, ledger=ledger),
        )
