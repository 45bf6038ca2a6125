"""How large the repository is, and that it does not grow: `make size` prints it.

Lines are those of tracked Python files, words those of tracked Markdown. A bound that has become loose is lowered, so
that what was saved stays saved.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("core/", "server/", "adapters/", "algorithms/", "rewards/", "apps/")
CORE, SERVER = "core/agl_core/", "server/agl_server/"
BOUNDS = {
    "lines of the product": 49050,
    "files of the product": 251,
    "lines of the core": 14658,
    "lines of the server": 13246,
    "lines of the largest room of both": 2817,
    "modules in a circle of imports": 0,
    "lines of all Python": 113570,
    "words of Markdown": 82969,
    "files that one call passes": 36,
    "settings": 211,
}
SLACK = 0.01
"""A bound may be this much above the figure."""


def measure() -> dict[str, int]:
    """Today's figure for each bound."""
    command = ["git", "ls-files", "*.py", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = {path: (ROOT / path).read_text() for path in listed}
    lines = {path: len(text.splitlines()) for path, text in texts.items() if path.endswith(".py")}
    product = {path: n for path, n in lines.items() if path.startswith(PRODUCT) and "/tests/" not in path}
    both = {path: n for path, n in product.items() if path.startswith((CORE, SERVER))}
    rooms: Counter[str] = Counter()
    for path, n in both.items():
        rooms["/".join(path.split("/")[:3])] += n
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    path_of_a_call = re.findall(r"^\| `([\w/-]+\.py)` \|", architecture, re.MULTILINE)
    settings = re.findall(r"^\| `", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE)
    return {
        "lines of the product": sum(product.values()),
        "files of the product": len(product),
        "lines of the core": sum(n for path, n in both.items() if path.startswith(CORE)),
        "lines of the server": sum(n for path, n in both.items() if path.startswith(SERVER)),
        "lines of the largest room of both": max(rooms.values()),
        "modules in a circle of imports": len(circles(product)),
        "lines of all Python": sum(lines.values()),
        "words of Markdown": sum(len(text.split()) for path, text in texts.items() if path.endswith(".md")),
        "files that one call passes": len(path_of_a_call),
        "settings": len(settings),
    }


def circles(files: Iterable[str]) -> list[str]:
    """Modules that import each other, straight or by others, in functions and for types included."""
    modules = {_module(path): ROOT / path for path in files}
    remaining = {name: _imported(file, modules.keys()) - {name} for name, file in modules.items()}
    while free := _free(remaining) | _free(_turned(remaining)):
        remaining = {name: imported - free for name, imported in remaining.items() if name not in free}
    return sorted(remaining)


def _free(imports: Mapping[str, set[str]]) -> set[str]:
    return {name for name, imported in imports.items() if not imported}


def _turned(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    return {name: {other for other, imported in imports.items() if name in imported} for name in imports}


def _module(path: str) -> str:
    return ".".join(Path(path).with_suffix("").parts).partition("agl_")[2].removesuffix(".__init__")


def _imported(file: Path, modules: Collection[str]) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("agl_"):
            module = node.module.removeprefix("agl_")
            inside = {f"{module}.{alias.name}" for alias in node.names}
            names |= inside & set(modules) or {module}
    return names & set(modules)


def test_nothing_grows_and_bounds_follow() -> None:
    figures = measure()
    too_large = {name: figures[name] for name, bound in BOUNDS.items() if figures[name] > bound}
    assert not too_large, "Something grew: take as much away elsewhere."
    loose = {name: figures[name] for name, bound in BOUNDS.items() if figures[name] < bound * (1 - SLACK) - 1}
    assert not loose, "Something shrank: lower its bound to this."


if __name__ == "__main__":
    for name, figure in measure().items():
        print(f"{name:34} {figure:8,}  at most {BOUNDS[name]:,}")
