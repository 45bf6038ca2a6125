"""The patch of what an attempt changed in its workspace, and applying it to a fresh copy.

The agent may have planted anything there. The patch is made of the files' bytes alone, in a git directory elsewhere: no
hook, filter, attribute or configuration of the workspace takes effect.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from agl_core.errors import AgentError, AglError
from agl_core.types.forms import dump_json
from agl_core.wire import MAX_RESULT

GIT_ENVIRONMENT = {
    "PATH": os.environ.get("PATH", os.defpath),
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
}
"""The environment of git where it works on files of agents: nothing of the user's configuration takes effect."""
MAX_PATCH = MAX_RESULT * 3 // 4
"""Bytes of a patch as JSON; the rest of a result is for the agent's text."""
MAX_CHANGED = 64 << 20
"""Bytes of all changed files, before and after."""
_MAX_WORDS = 2000


class GitError(AglError, RuntimeError):
    """git failed, or is not installed."""


class PatchError(ValueError):
    """A patch does not fit the files that it is to change, or is none."""


def make_patch(pristine: Path, folder: Path, ignore: Sequence[str]) -> str:
    """The changes as a git patch, which `apply_patch` takes; it blocks. Nothing must write to the folder meanwhile.

    It has regular files, also binary ones, and symbolic links that stay inside. Devices, sockets, links out of the
    folder and everything called `.git` are left out. AgentError if the folder cannot be read, or the patch would not
    fit into a result.
    """
    try:
        return _patch(pristine, folder, ignore)
    except OSError as error:
        raise AgentError(f"The workspace cannot be read: {error}") from error


def _patch(pristine: Path, folder: Path, ignore: Sequence[str]) -> str:
    before, after = (_files(root, ignore) for root in (pristine, folder))
    changed = [
        name
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) or not _is_same(pristine / name, folder / name)
    ]
    sides = ((pristine, before), (folder, after))
    total = sum((root / name).lstat().st_size for root, files in sides for name in changed if name in files)
    if total > MAX_CHANGED:
        raise _too_large(f"{total} bytes of files, and {MAX_CHANGED}")
    if not changed:
        return ""
    with _git_directory() as git:
        commits = [*_commit("before", pristine, before, changed), *_commit("after", folder, after, changed)]
        run_git("fast-import", "--quiet", folder=git, stdin=b"".join(commits))
        compare = ("diff", "--binary", "--no-ext-diff", "--no-textconv", "--no-renames", "before", "after")
        try:
            patch = run_git(*compare, folder=git).decode()
        except UnicodeDecodeError:  # Texts in another encoding than JSON's travel as binary files do.
            (git / "info" / "attributes").write_text("* -diff\n")
            patch = run_git(*compare, folder=git).decode(errors="replace")
    if (size := len(dump_json(patch).encode())) > MAX_PATCH:
        raise _too_large(f"a patch of {size} bytes, and {MAX_PATCH}")
    return patch


def _too_large(what: str) -> AgentError:
    return AgentError(
        f"The changes in the workspace are {what} are the limit. Name what is built there in workspace.ignore."
    )


def patched_paths(patch: str) -> list[str]:
    """The paths that a patch changes. PatchError if it cannot be read."""
    if not patch:
        return []
    with _git_directory() as git:
        listed = _apply(git, git, patch, "--numstat", "-z").decode(errors="surrogateescape")
    return [entry.split("\t", 2)[2] for entry in listed.split("\0") if entry]


def apply_patch(patch: str, folder: Path, excluded: Sequence[str] = ()) -> None:
    """Apply a patch of `make_patch` to a copy of what it was made against. PatchError if it does not fit.

    `excluded` are paths whose changes are left out. Nothing is written outside of the folder.
    """
    if patch:
        with _git_directory() as git:
            _apply(git, folder, patch, *(f"--exclude={_literal(path)}" for path in excluded))


def _apply(git: Path, folder: Path, patch: str, *options: str) -> bytes:
    # The attributes of the git directory win over those in the tree: no conversion, no filter.
    (git / "info" / "attributes").write_text("* -text !eol !ident !filter !working-tree-encoding !whitespace\n")
    environment = {**GIT_ENVIRONMENT, "GIT_DIR": str(git), "GIT_WORK_TREE": str(folder)}
    if re.search(r"^(rename|copy) from ", patch, re.MULTILINE):
        raise PatchError("it renames files: make it by git diff --no-renames")
    try:
        return run_git(
            "apply", "--whitespace=nowarn", *options, "-", folder=folder, env=environment, stdin=patch.encode()
        )
    except GitError as error:
        raise PatchError(str(error)) from None


def place_file(root: Path, path: str, content: bytes) -> None:
    """Write a file inside the root, whatever is in its place; no link is followed."""
    folder, (*above, name) = root, PurePosixPath(path).parts
    for part in above:
        folder /= part
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        folder.mkdir(exist_ok=True)
    file = folder / name
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    file.write_bytes(content)


def is_matched(path: str, patterns: Sequence[str]) -> bool:
    """True if a pattern without a slash matches a part of the path, or one with a slash the path or a folder above.

    >>> is_matched("a/conftest.py", ["conftest.py"]), is_matched("b/a.py", ["a/*"]), is_matched("a/b/c", ["a/b"])
    (True, False, True)
    """
    parts = path.split("/")
    above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in (above if "/" in pattern else parts))


def _files(root: Path, ignore: Sequence[str]) -> dict[str, tuple[str, str | None]]:
    """Mode and link target of each file below the root that can be part of a patch, by path."""
    files: dict[str, tuple[str, str | None]] = {}
    folders, real = [""], os.path.realpath(root)
    while folders:  # No recursion: an agent can nest folders deeply.
        above = folders.pop()
        with os.scandir(root / above) as entries:
            for entry in entries:
                path = f"{above}{entry.name}"
                if entry.name.lower() == ".git" or is_matched(path, ignore):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{path}/")
                elif entry.is_symlink():
                    target, place = os.readlink(entry.path), os.path.realpath(entry.path)
                    if not os.path.isabs(target) and Path(place).is_relative_to(real):  # Links may lead through links.
                        files[path] = ("120000", target)
                elif entry.is_file(follow_symlinks=False):
                    executable = entry.stat(follow_symlinks=False).st_mode & stat.S_IXUSR
                    files[path] = ("100755" if executable else "100644", None)
    return files


def _is_same(before: Path, after: Path) -> bool:
    if before.is_symlink():
        return True
    return before.stat().st_size == after.stat().st_size and before.read_bytes() == after.read_bytes()


def _commit(
    name: str, root: Path, files: Mapping[str, tuple[str, str | None]], changed: Sequence[str]
) -> Iterator[bytes]:
    """A commit of the changed files as git's fast-import reads it."""
    yield f"commit refs/heads/{name}\ncommitter agl <> 0 +0000\ndata 0\n".encode()
    for path in changed:
        if path in files:
            mode, target = files[path]
            content = (root / path).read_bytes() if target is None else os.fsencode(target)
            quoted = os.fsencode(path).replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")
            yield b'M %s inline "%s"\ndata %d\n%s\n' % (mode.encode(), quoted, len(content), content)


@contextlib.contextmanager
def _git_directory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="agl-git-") as folder:
        directory = Path(folder)
        run_git("init", "--quiet", "--bare", "--template=", ".", folder=directory)
        (directory / "info").mkdir()
        yield directory


def run_git(
    *arguments: str, folder: Path = Path("/"), env: Mapping[str, str] = GIT_ENVIRONMENT, stdin: bytes = b""
) -> bytes:
    """The output of git. GitError with its words if it fails."""
    identity = ["-c", "user.name=agl", "-c", "user.email=agl@localhost"]
    command = ["git", *identity, "-c", "core.hooksPath=/dev/null", *arguments]
    try:
        return subprocess.run(command, cwd=folder, env=env, input=stdin, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise GitError("Workspaces need the program git, which is not installed.") from None
    except subprocess.CalledProcessError as error:
        words = error.stderr[-_MAX_WORDS:].decode(errors="replace").strip()
        raise GitError(f"git {arguments[0]} failed: {words}") from None


def _literal(path: str) -> str:
    """The path as a pattern that matches nothing else."""
    return "".join(f"\\{character}" if character in "*?[\\" else character for character in path)
