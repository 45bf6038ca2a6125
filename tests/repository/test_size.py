"""How large the repository is, and that it does not grow: `make size` prints it.

Lines are those of tracked Python files. A bound that has become loose is lowered, so that what was saved stays saved.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("core/", "adapters/", "algorithms/", "rewards/", "apps/")
CORE = "core/agl_core/"
BOUNDS = {
    "lines of the product": 45910,
    "files of the product": 236,
    "lines of the core": 27740,
    "lines of the core's largest room": 2957,
    "lines of all Python": 107180,
    "files that one call passes": 42,
    "folders that one call passes": 12,
    "settings": 177,
}
SLACK = 0.01
"""A bound may be this much above the figure."""


def measure() -> dict[str, int]:
    """Today's figure for each bound."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in listed.stdout.split()}
    product = {path: n for path, n in lines.items() if path.startswith(PRODUCT) and "/tests/" not in path}
    core = {path: n for path, n in product.items() if path.startswith(CORE)}
    rooms: Counter[str] = Counter()
    for path, n in core.items():
        rooms[path.removeprefix(CORE).partition("/")[0]] += n
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    path_of_a_call = re.findall(r"^\| `([\w/-]+\.py)` \|", architecture, re.MULTILINE)
    settings = re.findall(r"^\| `", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE)
    return {
        "lines of the product": sum(product.values()),
        "files of the product": len(product),
        "lines of the core": sum(core.values()),
        "lines of the core's largest room": max(rooms.values()),
        "lines of all Python": sum(lines.values()),
        "files that one call passes": len(path_of_a_call),
        "folders that one call passes": len({str(Path(file).parent) for file in path_of_a_call}),
        "settings": len(settings),
    }


def test_nothing_grows_and_bounds_follow() -> None:
    figures = measure()
    too_large = {name: figures[name] for name, bound in BOUNDS.items() if figures[name] > bound}
    assert not too_large, "Something grew: take as much away elsewhere."
    loose = {name: figures[name] for name, bound in BOUNDS.items() if figures[name] < bound * (1 - SLACK) - 1}
    assert not loose, "Something shrank: lower its bound to this."


if __name__ == "__main__":
    for name, figure in measure().items():
        print(f"{name:34} {figure:8,}  at most {BOUNDS[name]:,}")
