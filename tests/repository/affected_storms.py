"""Prints the folders and files with storms (see the markers in pyproject.toml) that a change concerns.

`git diff --name-only BASE | python tests/repository/affected_storms.py`: reads paths, prints what to give to pytest. A
path that belongs to none of the areas below concerns all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

ACROSS = ("tests/end_to_end", "tests/repository", "tests/settings", "tests/tutorial")
"""The parts that run whole runs, or every part."""
STORMS: Mapping[str, tuple[str, ...]] = {
    ".github/": ("tests/repository",),
    "adapters/": ("adapters", "server/tests/cli", "tests/conformance", "tests/repository"),
    "algorithms/": ("algorithms", "tests/gpu", *ACROSS),
    "apps/": ("apps", "tests/repository"),
    "deploy/": ("deploy",),
    "docs/": (),
    "docs/tutorial/": ("tests/tutorial",),
    "examples/": ("examples", "tests/end_to_end", "tests/tutorial"),
    "rewards/": ("rewards", "examples", "tests/repository", "tests/settings"),
    "tests/faults_in_data/": (),
    "tests/oracles/": (),
}
"""By the beginning of a changed path, where storms are that it concerns; those of `tests/NAME/` are there."""
PLAYED = "docs/tutorial/"
"""Pages that a storm plays; all others are text to the storms."""
EVERYWHERE = ("adapters", "algorithms", "apps", "core/tests", "server/tests", "deploy", "examples", "rewards", "tests")


def affected(paths: Iterable[str]) -> list[str]:
    """The places for these changed paths.

    >>> affected(["deploy/README.md", "tests/faults/test_faults.py"])
    ['tests/faults']
    >>> affected(["core/agl_core/errors.py"]) == list(EVERYWHERE)
    True
    """
    areas_affected: set[str] = set()
    for path in paths:
        if path.endswith(".md") and not path.startswith(PLAYED):
            continue
        areas = [places for beginning, places in STORMS.items() if path.startswith(beginning)]
        folder = "/".join(path.split("/")[:2])
        if not areas and path.count("/") > 1 and folder.startswith("tests/") and folder != "tests/support":
            areas = [(folder,)]
        if not areas:
            return list(EVERYWHERE)
        areas_affected.update(*areas)
    return sorted(areas_affected)


if __name__ == "__main__":
    print(" ".join(affected(line.strip() for line in sys.stdin if line.strip())))
