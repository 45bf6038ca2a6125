"""Helpers of the repository's tests: where everything is, and how its sources are read."""

from __future__ import annotations

import ast
import functools
import importlib.util
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Import:
    """One import statement's target: the deepest module that it names."""

    importer: str
    """The dotted name of the importing module."""
    target: str
    line: str
    """`file:line`."""
    always: bool
    """True if importing the importer runs it: not inside a function or under TYPE_CHECKING."""

    @property
    def package(self) -> str:
        return self.target.split(".")[0]


@dataclass(frozen=True)
class Distribution:
    folder: Path
    project: dict[str, Any]
    """The table [project] of its pyproject.toml."""

    @property
    def package(self) -> str:
        return str(self.project["name"]).replace("-", "_")

    @property
    def sources(self) -> list[Path]:
        return sorted((self.folder / self.package).rglob("*.py"))

    @functools.cached_property
    def imports(self) -> Sequence[Import]:
        imports: list[Import] = []
        for file in self.sources:
            parts = file.relative_to(self.folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            imports += _imports_of(file, module, is_package)
        return imports


def _imports_of(file: Path, module: str, is_package: bool) -> Iterator[Import]:
    tree = ast.parse(file.read_text(), str(file))
    pending: list[tuple[ast.AST, bool]] = [(tree, True)]
    while pending:
        node, always = pending.pop()
        line = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, line, always)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if is_package else module.rpartition(".")[0]
                base = importlib.util.resolve_name("." * node.level + base, package)
            for alias in node.names:
                inside = ROOT_OF.get(base.split(".")[0])
                target = f"{base}.{alias.name}"
                yield Import(module, target if inside and _is_module(inside, target) else base, line, always)
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        pending += [(child, always and not lazy) for child in ast.iter_child_nodes(node)]


def _is_module(folder: Path, dotted: str) -> bool:
    path = folder.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _distributions() -> dict[str, Distribution]:
    by_name = {}
    for file in sorted([*ROOT.glob("*/pyproject.toml"), *ROOT.glob("*/*/pyproject.toml")]):
        distribution = Distribution(file.parent, tomllib.loads(file.read_text())["project"])
        by_name[distribution.project["name"]] = distribution
    return by_name


DISTRIBUTIONS = _distributions()
"""By name."""
ROOT_OF = {distribution.package: distribution.folder for distribution in DISTRIBUTIONS.values()}


@functools.cache
def names_in(module: str) -> set[str]:
    """The names that can be imported from this module of a distribution: its own, and the modules of its folder."""
    path = ROOT_OF[module.split(".")[0]].joinpath(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    names = {file.stem for file in path.glob("*")}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.alias(asname=str(name)) | ast.alias(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
    return names
