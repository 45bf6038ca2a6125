"""The folder that an attempt works in: a copy of a folder, of a git commit, or of a task's own files.

source ──copied once──▶ pristine copy, with `setup` run in it (cached) ──copied──▶ workspace ──▶ patch
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from agl_core.config.models import RunConfig
from agl_core.config.resolve import with_absolute_paths
from agl_core.config.sections import Section
from agl_core.errors import AglError
from agl_core.types import Json
from agl_harnesses.patches import GIT_ENVIRONMENT, GitError, make_patch, place_file, run_git

PLACES = ("{workspace}", "{home}", "{sandbox}", "{name}", "{user}")
"""The placeholders of `wrap`."""
_SETUP_TAIL = 2000
_KEPT = 30 * 24 * 3600
"""Seconds that a cached copy is kept after its last use: longer than any attempt runs."""


class WorkspaceError(AglError, RuntimeError):
    """A workspace cannot be made: its source is missing, or its setup failed."""


def _are_inside(files: dict[str, str]) -> dict[str, str]:
    for path in files:
        if not path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ValueError(f"the file '{path}' is not inside the workspace")
    return files


Files = Annotated[dict[str, str], AfterValidator(_are_inside)]
"""Texts of files, by their paths in a workspace."""


_SYSTEM = ("bin", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr")


def check_mount(path: str) -> str:
    """The path, if a workspace can be there in the sandbox; else ValueError."""
    root, *parts = PurePosixPath(path).parts or [""]
    if root != "/" or not parts or ".." in parts or (parts[0] in _SYSTEM and not path.startswith("/usr/src/")):
        raise ValueError(f"the sandbox cannot have a workspace at '{path}', but for instance at '/app'")
    return path


class WorkspaceSource(Section):
    """The origin of a workspace's files: a folder, or a commit of a git repository. Neither: it is empty."""

    folder: Path | None = None
    """The folder that is copied for each attempt."""
    repository: str | None = None
    """A git repository, by path or URL; `commit` says which state of it."""
    commit: Annotated[str, Field(pattern="^[0-9a-f]{7,64}$")] | None = None
    """The hash of the commit. The workspace is a repository of this one commit, without its history or its future."""

    files: Files = Field({})
    """Texts of files, by path; a folder's or a commit's own are replaced."""
    mount: Annotated[str, AfterValidator(check_mount)] | None = None
    """The path of the workspace in the sandbox of bubblewrap, for instance /app; absent: another for each attempt."""
    variables: dict[str, str] = Field({})
    """Environment variables of what runs in the workspace; a harness's own win."""

    @model_validator(mode="after")
    def _is_one(self) -> WorkspaceSource:
        if (self.repository is None) != (self.commit is None):
            raise ValueError("`repository` and `commit` belong together: give both or neither")
        if self.folder is not None and self.repository is not None:
            raise ValueError("the files come from `folder` or from `repository`: give one of them")
        return self


class WorkspaceSection(WorkspaceSource):
    """The folder that each attempt of a harness works in, and the limits of what runs there."""

    setup: str | None = None
    """A shell command that is run once in a copy of the source; attempts get copies of the result. It runs without a
    sandbox. Paths below the copy change with each attempt."""
    runner: Literal["auto", "plain", "bubblewrap", "command"] = "auto"
    """`bubblewrap`: a sandbox with a system that cannot be written, a /tmp of its own and no network but the gateway.
    `plain`: a process of the same user, which can read what the user can. `auto`: bubblewrap if it works here.
    `command`: `wrap` starts a container."""
    wrap: tuple[str, ...] = ()
    """The command that runs the command behind it in a container. It mounts the folders {workspace}, {home} and
    {sandbox} at the same paths; {name} is different for each, {user} the worker's user and group."""
    network: bool = False
    """True: the sandbox of bubblewrap has the machine's network; in a container nothing stands in for the gateway."""
    reads: tuple[Path, ...] = ()
    """Further folders that programs in the sandbox may read, such as those of a compiler outside of /usr."""
    memory_mib: Annotated[int, Field(ge=16)] | None = None
    """The memory that each process may have, in MiB."""
    processes: Annotated[int, Field(ge=4)] | None = None
    """The number of processes at a time; with more, all of them are ended."""
    disk_mib: Annotated[int, Field(ge=1)] | None = None
    """The space that the workspace and the home may take, in MiB; with more, all processes are ended."""
    ignore: tuple[str, ...] = ("__pycache__", "*.pyc", ".pytest_cache", "node_modules")
    """Files and folders that are no part of the patch, by name or, with a slash, by path; `*`, `?` and `[…]` match."""

    @model_validator(mode="after")
    def _is_wrapped(self) -> WorkspaceSection:
        missing = [place for place in PLACES[:3] if place not in " ".join(self.wrap)]
        if (self.runner == "command") != bool(self.wrap) or (self.wrap and missing):
            raise ValueError("runner 'command', and no other, needs `wrap` with {workspace}, {home} and {sandbox}")
        if unknown := set(re.findall(r"(?<!\$)\{\w+\}", " ".join(self.wrap))) - {*PLACES}:
            raise ValueError(f"`wrap` has no placeholder {min(unknown)}, but {', '.join(PLACES)}")
        return self


def task_source(task_input: Json, where: str = "the task's input") -> WorkspaceSource | None:
    """The source that a task brings under `workspace`. WorkspaceError, which says `where`, if it cannot be one."""
    if not isinstance(task_input, dict) or (described := task_input.get("workspace")) is None:
        return None
    try:
        return WorkspaceSource.model_validate(described)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, ("workspace", *problem["loc"])))
        raise WorkspaceError(
            f"{where}: `{place}`: {problem['msg']}. It has a folder, or a repository and a commit."
        ) from None


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "agl"


class Workspaces:
    """Makes workspaces as a [workspace] table says; `folder` is the one that relative paths start at."""

    def __init__(self, section: WorkspaceSection, folder: Path) -> None:
        self.section, self._folder = section, folder
        self._cache = cache_folder() / "workspaces"

    @classmethod
    def of(cls, config: RunConfig | None) -> Workspaces:
        """As the configuration's table says; without one, the defaults in the current folder."""
        if config is None:
            return cls(WorkspaceSection(), Path())
        section = WorkspaceSection.model_validate((config.model_extra or {}).get("workspace", {}))
        return cls(with_absolute_paths(section, config.folder), config.folder)

    def create(self, source: WorkspaceSource | None, folder: Path) -> Workspace:
        """A workspace at `folder`, which does not exist yet, from a task's source or else the table's; it blocks.

        WorkspaceError if the source is not there or its setup fails.
        """
        own, section = source or self.section, self.section
        pristine = self._pristine(own)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _copy(pristine, folder)
        mount = own.mount or section.mount or str(folder)
        return Workspace(folder, pristine, section, mount, {**section.variables, **own.variables})

    def _pristine(self, source: WorkspaceSource) -> Path:
        """The cached copy of the source with its setup done; the first to need it makes it."""
        if source.folder is not None:
            origin = (self._folder / source.folder.expanduser()).resolve()
            if not origin.is_dir():
                raise WorkspaceError(f"workspace.folder: there is no folder {origin}. Correct the path.")
            identity: list[Json] = ["folder", str(origin), fingerprint(origin)]
        elif source.repository is not None and source.commit is not None:
            local = (self._folder / source.repository).resolve()
            repository = str(local) if local.is_dir() else source.repository
            identity = ["commit", repository, source.commit]
        else:
            identity = ["empty"]
        digest = hashlib.sha256(repr([*identity, source.files, self.section.setup]).encode()).hexdigest()[:32]
        pristine = self._cache / "trees" / digest
        with self._locked(digest):
            is_new = not pristine.is_dir()
            if is_new:
                pristine.parent.mkdir(parents=True, exist_ok=True)
                with TemporaryDirectory(dir=self._cache, prefix="new-") as new:
                    tree = Path(new) / "tree"
                    if source.folder is not None:
                        _copy(origin, tree)
                    else:
                        tree.mkdir()
                    if source.commit is not None:
                        self._check_out(repository, source.commit, tree)
                    for path, text in source.files.items():
                        place_file(tree, path, text.encode())
                    self._set_up(tree)
                    tree.rename(pristine)
            os.utime(pristine)
        if is_new:
            self._remove_unused()
        return pristine

    def _remove_unused(self) -> None:
        """Remove copies that no attempt has begun with for long. One that still runs needs its copy for the patch."""
        for tree in (self._cache / "trees").iterdir():
            with self._locked(tree.name), TemporaryDirectory(dir=self._cache, prefix="old-") as old:
                if tree.is_dir() and tree.stat().st_mtime < time.time() - _KEPT:
                    tree.rename(Path(old) / "tree")

    def _check_out(self, repository: str, commit: str, tree: Path) -> None:
        """Write the files of a commit to `tree`, as a repository of one commit."""
        clone = self._cache / "clones" / hashlib.sha256(repository.encode()).hexdigest()[:32]
        asks_nobody = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        with self._locked(clone.name):
            if not clone.is_dir():
                part = clone.with_name(f"{clone.name}.part")
                shutil.rmtree(part, ignore_errors=True)
                run_git("clone", "--quiet", "--bare", "--", repository, str(part), env=asks_nobody)
                part.rename(clone)
            try:
                run_git("cat-file", "-e", f"{commit}^{{commit}}", folder=clone)
            except GitError:
                run_git("fetch", "--quiet", "origin", "+refs/*:refs/*", folder=clone, env=asks_nobody)
                run_git("cat-file", "-e", f"{commit}^{{commit}}", folder=clone)
        index = {"GIT_DIR": str(clone), "GIT_WORK_TREE": str(tree), "GIT_INDEX_FILE": f"{tree}.index"}
        for arguments in (["read-tree", commit], ["checkout-index", "--all"]):
            run_git(*arguments, folder=tree, env={**GIT_ENVIRONMENT, **index})
        for command in ("init --quiet", "add --all --force .", "commit --quiet --allow-empty --message=Start"):
            run_git(*command.split(), folder=tree)

    def _set_up(self, tree: Path) -> None:
        if self.section.setup is None:
            return
        done = subprocess.run(
            ["sh", "-c", self.section.setup],
            cwd=tree,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode != 0:
            tail = done.stdout[-_SETUP_TAIL:].decode(errors="replace").strip()
            raise WorkspaceError(
                f"workspace.setup: the command '{self.section.setup}' ended with status {done.returncode}. "
                f"Correct it; the end of its output:\n{tail}"
            )

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold the lock of a cached thing: workers of one machine share the cache."""
        (self._cache / "locks").mkdir(parents=True, exist_ok=True)
        with (self._cache / "locks" / name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@dataclass(frozen=True)
class Workspace:
    """An attempt's folder, and the copy that it was made from."""

    path: Path
    pristine: Path
    section: WorkspaceSection
    mount: str
    """Its path for what runs in it."""
    variables: Mapping[str, str]

    def diff(self) -> str:
        """The changes as a patch (`agl_harnesses.patches.make_patch`)."""
        return make_patch(self.pristine, self.path, self.section.ignore)


def _copy(origin: Path, folder: Path) -> None:
    """Copy a folder as it is, by reflinks where the file system has them."""
    done = subprocess.run(["cp", "-a", "--", str(origin), str(folder)], capture_output=True, check=False)
    if done.returncode != 0:
        words = done.stderr[-_SETUP_TAIL:].decode(errors="replace").strip()
        raise WorkspaceError(f"The workspace {origin} cannot be copied: {words}")


def fingerprint(folder: Path) -> str:
    """A digest of the names, sizes and times of all files below a folder."""
    digest = hashlib.sha256()
    for path, _, names in sorted(os.walk(folder)):
        for name in sorted(names):
            file = os.path.join(path, name)
            status = os.lstat(file)
            digest.update(f"{file!r} {status.st_size} {status.st_mtime_ns} {status.st_mode}\n".encode())
    return digest.hexdigest()
