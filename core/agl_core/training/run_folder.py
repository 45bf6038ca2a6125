"""A run's folder: made for a new run, and removed again if the run does not begin."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from agl_core import private
from agl_core.config.load import CONFIG_FILE, LoadedConfig, store_config
from agl_core.errors import CheckpointError, ConfigError


def new_run_dir(loaded: LoadedConfig) -> Path:
    """`runs/NAME`, or `runs/NAME-2` and so on if it is taken; holds the configuration as resolved."""
    base = loaded.config.runs / loaded.config.name
    return first_free(base, partial(store_config, loaded.config))


def first_free(base: Path, write: Callable[[Path], None]) -> Path:
    """Make the folder `base`, or `base-2` and so on if it is taken, with the configuration that `write` puts there."""
    for number in range(1, 10_000):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        _free(folder)
        with suppress(FileExistsError):
            make_run_dir(folder, write, may_exist=False)
            return folder
    raise CheckpointError(f"{base} and thousands of folders beside it are taken. Remove some or set `name`.")


def _free(folder: Path) -> None:
    """Remove what a failed start left: a folder with nothing but logs."""
    with suppress(OSError):
        names = list(folder.iterdir())
        if names and all(each.suffix == ".log" for each in names):
            for each in names:
                each.unlink()
            folder.rmdir()


def make_run_dir(folder: Path, write: Callable[[Path], None], *, may_exist: bool = True) -> None:
    """Make a run's folder and have `write` put its configuration there.

    FileExistsError if the folder exists, unless `may_exist`.
    """
    try:
        private.make_folder(folder, exist_ok=may_exist)
        write(folder)
    except OSError as error:
        if isinstance(error, FileExistsError) and not may_exist:
            raise
        raise ConfigError(
            f"The run's folder {folder} cannot be made or written ({error.strerror}: {error.filename}). Check the "
            f"permissions and the disk, or have runs elsewhere: --set runs=FOLDER."
        ) from error


def is_new(run_dir: Path) -> bool:
    """Whether a run's folder has nothing but its configuration."""
    return all(each.name == CONFIG_FILE for each in run_dir.iterdir())


@contextmanager
def removed_unless_begun(folder: Path | None) -> Iterator[Callable[[], None]]:
    """Remove a new run's folder if the block fails before it calls the function that it gets: nothing is in it yet.

    If the engine left a log, which its errors name, the log stays until a run takes the name. None: there is nothing to
    remove.
    """
    has_begun = False

    def begun() -> None:
        nonlocal has_begun
        has_begun = True

    try:
        yield begun
    except BaseException:
        if folder is not None and not has_begun:
            for each in folder.iterdir():
                if each.is_dir():
                    shutil.rmtree(each, ignore_errors=True)
                elif each.suffix != ".log" or not each.stat().st_size:
                    each.unlink()
            with suppress(OSError):  # A log stays.
                folder.rmdir()
        raise
