"""Tasks in the format of Harbor and Terminal-Bench, and the reward that a task's own tests write.

    folder ─▶ task, its workspace at WORKDIR ─▶ patch ─▶ fresh sandbox with /tests ─▶ tests/test.sh ─▶ reward

No image is built. A Dockerfile is read as far as it places files on a plain distribution, for which the machine's own
stands in; a task that needs more is left out, by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import posixpath
import re
import shlex
import shutil
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from pydantic import AliasPath, BaseModel, Field

import agl_core
from agl_core.config.models import RunConfig
from agl_core.config.sections import Section
from agl_core.errors import ConfigError
from agl_core.protocols import RewardRule
from agl_core.types import Episode, Reward, Task
from agl_harnesses.grading import patched_workspace, run_confined
from agl_harnesses.patches import PatchError, is_matched
from agl_harnesses.workspace import Workspaces, cache_folder, check_mount, fingerprint

logger = logging.getLogger(__name__)

STEERING = ("conftest.py", "pytest.ini", ".pytest.ini", "sitecustomize.py", "usercustomize.py", "*.pth")
"""Files that steer Python and pytest without being asked for: an attempt's changes to them are left out."""
_PLAIN_IMAGE = re.compile(r"(?:docker\.io/|(?:.*/)?library/|.*/t-bench/)?(?:debian|python|ubuntu)(?:[:@-].*)?")
_UNMET = (
    "steps", "agent.user", "environment.gpus", "environment.healthcheck", "environment.mcp_servers", "environment.os",
    "environment.skills_dir", "environment.tpu", "verifier.collect", "verifier.environment",
    "verifier.environment_mode", "verifier.user",
)  # fmt: skip
"""Settings of task.toml that ask for more than there is, unless they are empty or `_MET`."""
_MET = ("root", "linux", "shared")
_INSTALLS = re.compile(
    r"\b(?:apt(?:-get)? |apk add|dnf |yum |pip3? install|uvx? |npm (?:ci|i|install)\b"
    r"|(?:curl|wget)\b.*https?://(?!localhost|127\.)).*|.*>\(.*"
)
"""Commands of tests/test.sh that need the internet and a system of their own, or leave a process behind."""
_ELSEWHERE = re.compile(r"(?<![\w./-])/(?:app|data|home|mnt|opt|output|root|srv|var|workspace)\b[\w./-]*")
"""Absolute paths in texts; a patch has the working directory alone."""
_PRODUCED = re.compile(r"(?<![\w./-])/(?:etc|tmp|usr/local)\b[\w./-]*")
"""Further ones, which tests may use for themselves."""
_HOUSEKEEPING = re.compile(r"apt(-get)? (update|clean)|rm /var/lib/apt/lists/\*|ln /usr/bin/python3 /usr/bin/python")
_NOT_COPIED = re.compile(r"^\[|--(?!chown=|link)\w|<<|://|git@|\$|\.t(?:ar|gz|bz2|xz)")
"""Marks of a COPY or ADD that does more than copying files of the task."""
_CANARY = re.compile(r"(?:(?:<!--|#).*canary.*\n\s*)+", re.IGNORECASE)
_MAX_QUOTED, _MAX_REPORT = 100, 1 << 16
_SIGNALED = 128
"""From here on an exit status is that of a process that a signal has ended, or the launcher."""


_Variables = dict[Annotated[str, Field(pattern=r"^\w+$")], Annotated[str, Field(pattern=r"^[^\x00]*$")]]


class _Settings(BaseModel):
    """The settings of task.toml that take effect here."""

    image: str = Field("without a name", validation_alias=AliasPath("environment", "docker_image"))
    workdir: str = Field("", validation_alias=AliasPath("environment", "workdir"))
    variables: _Variables = Field({}, validation_alias=AliasPath("environment", "env"))
    timeout: float = Field(600.0, gt=0, allow_inf_nan=False, validation_alias=AliasPath("verifier", "timeout_sec"))
    test_variables: _Variables = Field({}, validation_alias=AliasPath("verifier", "env"))


@dataclass
class _Image:
    """The result of a Dockerfile, beside the image that it starts from."""

    copies: list[tuple[list[str], str]] = field(default_factory=list)
    """Files and folders of the build context, and where they go: into it, if it ends with a slash."""
    variables: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"


@agl_core.task_source
def harbor(
    *,
    path: Annotated[Path, Field(description="A folder of tasks, or one task; relative to the configuration file.")],
    installed: Annotated[tuple[str, ...], Field(description="Packages of this machine that images may install.")] = (),
) -> Iterator[Task]:
    """Tasks as Harbor and Terminal-Bench publish them: folders with `task.toml`, `instruction.md` and `tests/test.sh`.

    Tasks that are wrong or need an image are left out, and a warning names each. The reward `harbor` runs their tests.
    """
    folders = [file.parent for file in sorted([*path.glob("task.toml"), *path.glob("*/task.toml")])]
    if not folders:
        is_old = any(path.glob("**/task.yaml"))
        remedy = "Harbor's `harbor task migrate` converts Terminal-Bench 1's task.yaml" if is_old else "fix `path`"
        raise ConfigError(f"The task source 'harbor' needs a task.toml in {path} or in folders of it: {remedy}.")
    left_out = list[str]()
    for folder in folders:
        try:
            yield _read_task(folder, {*installed})
        except (ValueError, TypeError, AttributeError, OSError, RecursionError) as error:
            left_out.append(f"  {folder.name}: {' '.join(str(error).split())}")
    reasons = "\n".join(left_out)
    if len(left_out) == len(folders):
        raise ConfigError(f"The task source 'harbor' has no task in {path} that runs without an image.\n{reasons}")
    if left_out:
        logger.warning("%d of %d tasks in %s are left out:\n%s", len(left_out), len(folders), path, reasons)


def _read_task(folder: Path, installed: set[str]) -> Task:
    """The task in a folder. ValueError, which says why, if it cannot be had here."""
    table = tomllib.loads((folder / "task.toml").read_text())
    settings = _Settings.model_validate(table)
    for key in _UNMET:
        value: Any = table
        for part in key.split("."):
            value = value.get(part, {})
        if value and value not in _MET:
            raise ValueError(f"its task.toml has `{key}`")
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ValueError(f"it has no {name}")
    instruction, script = (folder / "instruction.md").read_text(), (folder / "tests" / "test.sh").read_text()
    for line in script.splitlines():
        if not line.lstrip().startswith("#") and (command := _INSTALLS.search(line)):
            raise ValueError(f"its tests/test.sh has `{command.group().strip()[:_MAX_QUOTED]}`")
    image = _read_image(folder / "environment", settings, installed)
    workdir = posixpath.normpath(settings.workdir or image.workdir)
    workdir = check_mount("/app" if workdir == "/" else workdir)
    named = _ELSEWHERE.findall(f"{instruction}\n{script}") + _PRODUCED.findall(instruction)
    for path in [target for _, target in image.copies] + named:
        if not f"{posixpath.normpath(path.rstrip('.'))}/".startswith(f"{workdir}/"):
            raise ValueError(f"it names {path}, outside of its working directory {workdir}")
    variables = {**image.variables, **settings.variables}
    if any("$" in value for value in (*variables.values(), *settings.test_variables.values())):
        raise ValueError("its environment variables refer to others")
    files = _place_files(folder / "environment", workdir, image)
    workspace = {"folder": str(files), "mount": workdir, "variables": variables}
    tests = {"folder": str((folder / "tests").resolve()), "timeout": settings.timeout}
    return Task(
        folder.name,
        {"prompt": _CANARY.sub("", instruction, count=1), "workspace": workspace},
        metadata={"harbor": {**tests, "variables": settings.test_variables}},
    )


def _read_image(context: Path, settings: _Settings, installed: set[str]) -> _Image:
    """The image of a task: that of its Dockerfile, of which a published `docker_image` is a build, or the latter."""
    for name in ("docker-compose.yaml", ".dockerignore"):
        if (context / name).exists():
            raise ValueError(f"it has environment/{name}")
    if not (context / "Dockerfile").is_file():
        _start_from(settings.image)
        return _Image([(["."], f"{settings.workdir or '/app'}/")] if context.is_dir() else [])
    image, has_start = _Image(), False
    text = (context / "Dockerfile").read_text()
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, rest = line.partition(" ")
        words = shlex.split(rest)
        match instruction.upper(), words:
            case "FROM", [name, *_] if not has_start:
                has_start = True
                _start_from(name)
            case "WORKDIR", [path] if "$" not in path:
                image.workdir = posixpath.join(image.workdir, path)
            case "ENV", [_, *_] if all("=" in word for word in words):
                image.variables.update(word.partition("=")[::2] for word in words)
            case "COPY" | "ADD", [_, _, *_] if not _NOT_COPIED.search(rest):
                *sources, target = (word for word in words if not word.startswith("--"))
                into = "/" if len(sources) > 1 or target.endswith(("/", ".")) else ""
                image.copies.append((sources, posixpath.join(image.workdir, target).rstrip("/") + into))
            case "RUN", _:
                image.copies += [([], f"{folder}/") for folder in _made_folders(rest, installed)]
            case (("CMD" | "EXPOSE" | "LABEL"), _):  # Harbor runs a command of its own.
                pass
            case _:
                raise ValueError(f"its Dockerfile has `{line[:_MAX_QUOTED]}`")
    return image


def _made_folders(commands: str, installed: set[str]) -> Iterator[str]:
    """The folders that a RUN makes. ValueError if it does more than that, and than installing what there is."""
    for command in commands.split("&&"):
        words = [word for word in shlex.split(command) if not word.startswith("-")]
        match words:
            case ["mkdir", *folders] if re.fullmatch(r"( /[\w./-]+)+", "".join(f" {folder}" for folder in folders)):
                yield from folders
            case ["apt" | "apt-get" | "pip" | "pip3", "install", *packages]:
                if missing := {re.split(r"[\[=<>!~]", package)[0] for package in packages} - installed:
                    raise ValueError(f"its Dockerfile installs {' '.join(sorted(missing))}, not named in `installed`")
            case _ if not _HOUSEKEEPING.fullmatch(" ".join(words)):
                raise ValueError(f"its Dockerfile has `RUN {commands[:_MAX_QUOTED]}`")


def _start_from(image: str) -> None:
    if not _PLAIN_IMAGE.fullmatch(image):
        raise ValueError(f"it needs the image {image}")


def _place_files(context: Path, workdir: str, image: _Image) -> Path:
    """The folder with the files that the image has in its working directory, made once."""
    identity = repr((fingerprint(context), workdir, image.copies))
    folder = cache_folder() / "harbor" / hashlib.sha256(identity.encode()).hexdigest()[:32]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix="new-") as new:
        tree = Path(new, "tree")
        tree.mkdir()
        for sources, target in image.copies:
            place = tree / posixpath.relpath(target, workdir)
            (tree if sources else place).mkdir(parents=True, exist_ok=True)
            for source in sources:
                pattern = posixpath.normpath(source.strip("/"))
                origins = [context] if pattern == "." else sorted(context.glob(pattern))
                if not origins or not all(path.resolve().is_relative_to(context.resolve()) for path in origins):
                    raise ValueError(f"its Dockerfile copies {source}, which is not in environment/")
                for origin in origins:
                    file = place / origin.name if target.endswith("/") or place.is_dir() else place
                    file.parent.mkdir(parents=True, exist_ok=True)
                    if origin.is_dir():
                        shutil.copytree(origin, place, symlinks=True, dirs_exist_ok=True)
                    else:
                        shutil.copy2(origin, file)
                    for link in tree.rglob("*"):
                        if link.is_symlink() and not link.resolve().is_relative_to(tree.resolve()):
                            raise ValueError(f"the link {link.relative_to(tree)} in environment/ leads out of it")
        with contextlib.suppress(OSError):  # Another process may have been faster.
            tree.rename(folder)
    return folder


def harbor_reward(_: Section, config: RunConfig | None) -> RewardRule:
    """The reward that a task of the source `harbor` reports, for the attempt's patch in a fresh sandbox.

    `tests/test.sh` runs in a fresh copy of the workspace, with the tests at /tests, which is there only then and cannot
    be written. Its report is `/logs/verifier/reward.json`, an object with a number `reward` or with one number, or
    `reward.txt`: 0 … 1. Anything else counts as 0, and so does a process that outlives the one that had started it.
    """
    workspaces = Workspaces.of(config)

    async def score(episode: Episode) -> list[Reward]:
        tests: Any = episode.task.metadata.get("harbor")
        if tests is None:
            raise ConfigError(
                f"Task '{episode.task.id}' has no tests for 'harbor'. Take tasks from the source 'harbor'."
            )
        output = ""
        try:
            async with patched_workspace(episode, workspaces, lambda path: is_matched(path, STEERING)) as (root, home):
                # Beside what the sandbox can write: no path inside leads to its parent.
                report = home.with_name("report")
                report.mkdir()
                mounts = [("--ro-bind", tests["folder"], "/tests"), ("--bind", str(report), "/logs/verifier")]
                command, variables = ["bash", "/tests/test.sh"], tests["variables"]
                status, output = await run_confined(
                    command, root, home, tests["timeout"], variables, mounts=mounts, alone=True
                )
                value, words = _reported(report, status)
        except PatchError as error:
            value, words = 0.0, f"The patch cannot be applied: {error}"
        evidence = f"{words}. The end of the output:\n{output}"
        return [Reward(episode.rollout, episode.attempt, "harbor", value, "", evidence=evidence)]

    return score


def _reported(folder: Path, status: int | None) -> tuple[float, str]:
    """The number in a report and, in words, how it came about; 0 if there is none, or there are two."""
    values = list[float]()
    try:
        if status is None or status >= _SIGNALED:
            raise ValueError("tests/test.sh took too long" if status is None else "tests/test.sh was ended")
        if (text := _read_report(folder / "reward.json")) is not None:
            report = json.loads(text)
            rewards = report if isinstance(report, dict) else {"reward": report}
            [reward] = [rewards["reward"]] if "reward" in rewards else rewards.values()
            if isinstance(reward, bool) or not isinstance(reward, int | float):
                raise ValueError("the JSON report has neither a number 'reward' nor one number alone")
            values.append(float(reward))
        if (text := _read_report(folder / "reward.txt")) is not None:
            if not re.fullmatch(r"\s*[\d.eE+-]+\s*", text, re.ASCII):
                raise ValueError("the text report is no number")
            values.append(float(text))
        # Harbor takes reward.json of two; code under test may have planted it.
        if len(set(values)) != 1 or not 0 <= values[0] <= 1:
            raise ValueError(f"it has to be one number between 0 and 1, not {values}")
    except (ValueError, OverflowError, RecursionError, OSError) as error:
        return 0.0, f"There is no valid report: {error}"
    return values[0], f"tests/test.sh reported {values[0]:g}"


def _read_report(path: Path) -> str | None:
    """The text of a file that may be anything, planted by code under test; None if there is none."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as file:
            modes = os.fstat(file.fileno()).st_mode, path.parent.stat().st_mode
            if not stat.S_ISREG(modes[0]) or not all(mode & stat.S_IWUSR for mode in modes):
                raise ValueError(f"{path.name} is no regular file, or was protected from being written")
            return file.read(_MAX_REPORT)
    except FileNotFoundError:
        return None
