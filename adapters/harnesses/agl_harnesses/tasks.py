"""Tasks for harnesses in formats that others publish."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

import agl_core
from agl_core.errors import ConfigError
from agl_core.types import Json, Task
from agl_core.types.forms import parse_json


@agl_core.task_source
def swe(
    *,
    path: Annotated[Path, Field(description="The file, relative to the configuration file.")],
    repositories: Annotated[str, Field(description="The path or URL of the repository `{repo}`.")] = (
        "https://github.com/{repo}"
    ),
) -> Iterator[Task]:
    """Issues of git repositories with the tests that fail before a fix: JSON Lines with the columns of SWE-bench.

    A row has `instance_id`, `repo`, `base_commit`, `problem_statement`, `test_patch`, and the tests `FAIL_TO_PASS` and
    `PASS_TO_PASS`, which the reward `tests_pass` reads.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"The task source 'swe' cannot read {path}: {error.strerror}. Correct its path.") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            tests = {name.lower(): _listed(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
            source = {"repository": repositories.replace("{repo}", row["repo"]), "commit": row["base_commit"]}
            task_input = {"prompt": row["problem_statement"], "workspace": source}
            metadata = {"tests": {"patch": row["test_patch"], **tests}}
            yield Task(row["instance_id"], task_input, metadata=metadata)
        except KeyError as error:
            raise ConfigError(f"{path}, line {number} has no {error}, which each row of 'swe' needs.") from None
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is no JSON: {error}.") from None


def _listed(tests: Json) -> Json:
    """Test ids as a list; published rows have it as a text of JSON."""
    return parse_json(tests) if isinstance(tests, str) else tests
