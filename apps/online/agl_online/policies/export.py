"""A version as a plain Hugging Face folder: as it was saved, or with its adapter merged into its base."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import orjson

from agl_core.errors import CheckpointError, ConfigError
from agl_core.protocols import PolicySpec
from agl_online.policies.card import model_card
from agl_online.policies.engines import Source, log_folder
from agl_online.policies.naming import Version

_ADAPTER = "adapter_config.json"


def export(version: Version, folder: Path, overrides: Sequence[str] = ()) -> None:
    """Write a version as it was saved: all weights, or its adapter, which names its base as it is found here.

    The folder appears whole or not at all. ConfigError if it exists, if the weights below an adapter are gone, or for
    step 0; CheckpointError if the checkpoint is removed meanwhile.
    """
    saved = _saved(version)
    source = Source.of(version.run, overrides)
    with _whole(folder) as part, _still_there(version):
        for file in sorted(saved.rglob("*")):
            target = part / file.relative_to(saved)
            if file.is_dir():
                target.mkdir()
            else:
                shutil.copyfile(file, target)
        if version.is_adapter:
            described = orjson.loads((part / _ADAPTER).read_bytes())
            described["base_model_name_or_path"] = source.loaded.weights(version.policy)
            (part / _ADAPTER).write_bytes(orjson.dumps(described, option=orjson.OPT_INDENT_2))
        card = model_card(version, source.loaded, "adapter" if version.is_adapter else "full")
        (part / "README.md").write_text(card, encoding="utf-8")


def merge(version: Version, folder: Path, overrides: Sequence[str] = (), engine: str | None = None) -> None:
    """Write a version's base with its adapter merged into it; errors as of `export`.

    ConfigError if the version has no adapter; EngineError if the adapter was trained on other weights than the base is
    now.
    """
    _saved(version)
    if not version.is_adapter:
        raise ConfigError(
            f"{version} has all weights and no adapter, so there is nothing to merge. Write it with: agl policy export "
            f"{version} --out {folder}."
        )
    source = Source.of(version.run, overrides)
    spec = source.spec(version)
    with _whole(folder) as part, _still_there(version):
        asyncio.run(_merged(source, spec, part, engine))
        (part / "README.md").write_text(model_card(version, source.loaded, "merged"), encoding="utf-8")


async def _merged(source: Source, spec: PolicySpec, folder: Path, name: str | None) -> None:
    with log_folder() as log:
        engine = source.engine(log, name)
        try:
            await engine.start()
            await engine.merge(spec, folder)
        finally:
            await engine.stop()


def _saved(version: Version) -> Path:
    if version.saved is None:
        raise ConfigError(f"{version} is what training started from, which nothing has to be written of.")
    return version.saved


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` at the end, or vanishes if the block fails."""
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists. Remove it, or name another folder with --out.")
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        yield part
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextmanager
def _still_there(version: Version) -> Iterator[None]:
    """CheckpointError if the version's checkpoint is removed meanwhile: training removes old ones."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        if version.checkpoint is not None and not version.checkpoint.exists():
            raise CheckpointError(
                f"{version} was removed while it was read: the run keeps its last checkpoints only. Take a later "
                f"version, or have it kept: agl policy promote."
            ) from error
        raise
