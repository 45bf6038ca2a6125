from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from agl_core.errors import AgentError
from agl_core.wire import MAX_RESULT
from agl_harnesses.patches import MAX_CHANGED, GitError, PatchError, apply_patch, patched_paths
from agl_harnesses.workspace import WorkspaceError, Workspaces, WorkspaceSection, WorkspaceSource, task_source


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "src" / "a.py").write_text("one\ntwo\n")
    (project / "data.bin").write_bytes(bytes(range(256)))
    (project / "run.sh").write_text("echo\n")
    return tmp_path


def workspaces(root: Path, **settings: object) -> Workspaces:
    return Workspaces(WorkspaceSection.model_validate({"folder": "project", **settings}), root)


def git(*arguments: str, folder: Path) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def tree(folder: Path) -> dict[str, object]:
    """Everything below a folder: links by their targets, files by their bytes and whether they can be executed."""
    paths = [path for path in folder.rglob("*") if ".git" not in path.relative_to(folder).parts]
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else (path.read_bytes(), os.access(path, os.X_OK))
        for path in paths
        if path.is_symlink() or path.is_file()
    }


def change_all_kinds(folder: Path) -> None:
    (folder / "src" / "a.py").write_text("one\n2\n")
    (folder / "data.bin").write_bytes(bytes(range(255, -1, -1)))
    (folder / "run.sh").chmod(0o755)
    (folder / 'odd "name"\nin two [lines]*.txt').write_text("no end of line")
    (folder / "latin1.txt").write_bytes("über\n".encode("latin-1"))
    (folder / "empty").touch()
    (folder / "link").symlink_to("src/a.py")
    (folder / "wörter").mkdir()
    (folder / "wörter" / "crlf.txt").write_bytes(b"a\r\nb\r\n")


def test_a_patch_carries_every_change_to_a_fresh_copy(root: Path) -> None:
    made = workspaces(root)
    attempt, fresh = made.create(None, root / "attempt"), made.create(None, root / "fresh")
    assert attempt.diff() == ""
    change_all_kinds(attempt.path)
    apply_patch(attempt.diff(), fresh.path)
    assert tree(fresh.path) == tree(attempt.path)
    (attempt.path / "src" / "a.py").unlink()
    (attempt.path / "src").rmdir()
    (attempt.path / "src").write_text("a file now")
    apply_patch(attempt.diff(), (third := made.create(None, root / "third")).path)
    assert tree(third.path) == tree(attempt.path)


def plant(folder: Path, outside: Path) -> None:
    """Leave all that could change, or run something in, the program that makes the patch."""
    for name in (".git", "src/.git"):
        git("init", "--quiet", str(folder / name).removesuffix(".git"), folder=folder)
        hooks = folder / name / "hooks"
        hooks.mkdir(exist_ok=True)
        for hook in ("post-index-change", "pre-commit", "reference-transaction"):
            (hooks / hook).write_text(f"#!/bin/sh\ntouch {outside / 'ran'}\n")
            (hooks / hook).chmod(0o755)
        for key in ("filter.x.clean", "filter.x.smudge", "diff.x.textconv", "diff.x.command", "core.fsmonitor"):
            git("config", key, f"touch {outside / 'ran'}; cat", folder=folder / name)
    (folder / ".gitattributes").write_text("* filter=x diff=x text eol=crlf\n*.py export-ignore binary\n")
    (folder / ".gitignore").write_text("*\n")
    (folder / "leads_out").symlink_to(outside)
    (folder / "absolute").symlink_to(outside / "secret")
    (folder / "up").symlink_to("../secret")
    (folder / "src" / "back").symlink_to("..")
    (folder / "src" / "up").symlink_to("back/../secret")
    os.mkfifo(folder / "pipe")


def test_nothing_that_an_agent_plants_takes_effect_or_is_followed(root: Path) -> None:
    made, outside = workspaces(root), root / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    attempt, fresh = made.create(None, root / "attempt"), made.create(None, root / "fresh")
    plant(attempt.path, outside)
    (attempt.path / "src" / "a.py").write_text("one\n2\n")
    patch = attempt.diff()
    assert patched_paths(patch) == [".gitattributes", ".gitignore", "src/a.py", "src/back"]
    apply_patch(patch, fresh.path)
    assert (fresh.path / "src" / "a.py").read_bytes() == b"one\n2\n"
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]


def test_changes_of_excluded_and_ignored_paths_are_left_out(root: Path) -> None:
    made = workspaces(root, ignore=["*.log", "build/out"])
    attempt, fresh = made.create(None, root / "attempt"), made.create(None, root / "fresh")
    for name in ("a[1].py", "a1.py", "b.log", "build/out/c", "build/d"):
        (attempt.path / name).parent.mkdir(parents=True, exist_ok=True)
        (attempt.path / name).touch()
    assert patched_paths(attempt.diff()) == ["a1.py", "a[1].py", "build/d"]
    apply_patch(attempt.diff(), fresh.path, ["a[1].py"])
    assert {"a1.py", "a[1].py"} & {*tree(fresh.path)} == {"a1.py"}


@pytest.mark.parametrize(
    "patch",
    [
        "no patch",
        "--- a/missing\n+++ b/missing\n@@ -1 +1 @@\n-a\n+b\n",
        "--- /dev/null\n+++ b/../out\n@@ -0,0 +1 @@\n+x\n",
        "--- /dev/null\n+++ b/.git/config\n@@ -0,0 +1 @@\n+x\n",
        "diff --git a/out b/out\nnew file mode 120000\n--- /dev/null\n+++ b/out\n@@ -0,0 +1 @@\n+..\n"
        "diff --git a/out/x b/out/x\nnew file mode 100644\n--- /dev/null\n+++ b/out/x\n@@ -0,0 +1 @@\n+x\n",
        "diff --git a/run.sh b/x\nsimilarity index 100%\nrename from run.sh\nrename to x\n",
    ],
    ids=["no patch", "another tree", "above", "in .git", "through a link", "a rename"],
)
def test_a_patch_that_does_not_fit_changes_nothing(root: Path, patch: str) -> None:
    fresh = workspaces(root).create(None, root / "deep" / "fresh")
    with pytest.raises(PatchError):
        apply_patch(patch, fresh.path)
    assert tree(fresh.path) == tree(root / "project")
    assert [path.name for path in (root / "deep").iterdir()] == ["fresh"]


def test_a_patch_that_is_too_large_for_a_result_is_refused(root: Path) -> None:
    attempt = workspaces(root).create(None, root / "attempt")
    for size, content in ((MAX_CHANGED + 1, ""), (None, "a line of what was built\n" * (MAX_RESULT // 25))):
        (attempt.path / "build.o").write_text(content)
        os.truncate(attempt.path / "build.o", size or len(content))
        with pytest.raises(AgentError, match=r"workspace\.ignore"):
            attempt.diff()
    assert replace(attempt, section=WorkspaceSection(ignore=("*.o",))).diff() == ""


def test_a_folder_that_cannot_be_read_is_an_error_of_the_attempt(root: Path) -> None:
    attempt = workspaces(root).create(None, root / "attempt")
    shutil.rmtree(attempt.path)
    with pytest.raises(AgentError, match="cannot be read"):
        attempt.diff()


def test_setup_runs_once_for_a_source_and_again_after_a_change(root: Path) -> None:
    made = workspaces(root, setup=f"echo x >> {root / 'runs'}; cat src/a.py > built")
    for name in ("first", "second"):
        assert (made.create(None, root / name).path / "built").read_text() == "one\ntwo\n"
    assert (root / "runs").read_text() == "x\n"
    (root / "project" / "src" / "a.py").write_text("three")
    assert (made.create(None, root / "third").path / "built").read_text() == "three"
    assert (root / "runs").read_text() == "x\nx\n"


def test_a_failing_setup_is_an_error_with_its_output(root: Path) -> None:
    for _ in range(2):  # The failure is not cached.
        with pytest.raises(WorkspaceError, match=r"(?s)workspace\.setup: .* status 3.*no such package"):
            workspaces(root, setup="echo no such package; exit 3").create(None, root / "attempt")


def test_a_commit_is_checked_out_without_its_history_and_its_future(root: Path) -> None:
    project = root / "project"
    git("init", "--quiet", folder=project)
    commits = []
    for text in ("first", "second", "third"):
        (project / "src" / "a.py").write_text(text)
        git("add", ".", folder=project)
        git("commit", "--quiet", "-m", text, folder=project)
        commits.append(git("rev-parse", "HEAD", folder=project).strip())
    made = Workspaces(WorkspaceSection(), root)
    for commit, text in zip(commits, ("first", "second", "third"), strict=True):
        attempt = made.create(WorkspaceSource(repository="project", commit=commit), root / text)
        assert (attempt.path / "src" / "a.py").read_text() == text
        assert len(git("log", "--all", "--format=%s", folder=attempt.path).split()) == 1
        assert git("status", "--short", folder=attempt.path) == ""
    with pytest.raises(GitError, match="git"):
        made.create(WorkspaceSource(repository="project", commit="0" * 40), root / "none")


def test_a_task_brings_its_own_source_or_is_refused_by_name(root: Path) -> None:
    assert task_source("a prompt") is task_source({"prompt": "a prompt"}) is None
    assert task_source({"workspace": {"folder": "other"}}) == WorkspaceSource(folder=Path("other"))
    both = {"folder": "a", "repository": "b", "commit": "0" * 40}
    for wrong in (both, {"repository": "b"}, {"image": "c"}, "d", {"files": {"../a": ""}}, {"files": {"/a": ""}}):
        with pytest.raises(WorkspaceError, match="Task 't': `workspace"):
            task_source({"workspace": wrong}, "Task 't'")
    with pytest.raises(WorkspaceError, match=r"workspace\.folder: there is no folder .*other"):
        workspaces(root).create(WorkspaceSource(folder=Path("other")), root / "attempt")


def test_texts_of_files_are_a_source_alone_or_over_a_folder(root: Path) -> None:
    source = WorkspaceSource(files={"a.py": "1\n", "new/b.py": "2\n"})
    alone = workspaces(root).create(source, root / "alone").path
    assert {path.relative_to(alone).as_posix() for path in alone.rglob("*.py")} == {"a.py", "new/b.py"}
    (root / "base").mkdir()
    (root / "base" / "a.py").write_text("0\n")
    (root / "base" / "c.py").write_text("3\n")
    over = workspaces(root).create(source.model_copy(update={"folder": Path("base")}), root / "over").path
    texts = {name: (over / name).read_text() for name in ("a.py", "new/b.py", "c.py")}
    assert texts == {"a.py": "1\n", "new/b.py": "2\n", "c.py": "3\n"}


def test_a_copy_that_nobody_used_for_long_is_removed_when_another_is_made(root: Path) -> None:
    made = workspaces(root)
    old, used = (made.create(WorkspaceSource(files={name: ""}), root / name) for name in ("old", "used"))
    for workspace in (old, used):
        os.utime(workspace.pristine, (0, 0))
    made.create(WorkspaceSource(files={"used": ""}), root / "again")
    made.create(WorkspaceSource(files={"new": ""}), root / "new")
    assert (old.pristine.exists(), used.pristine.exists()) == (False, True)
    assert (made.create(WorkspaceSource(files={"old": ""}), root / "old_again").path / "old").exists()
