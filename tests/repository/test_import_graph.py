"""Imports point one way: between the distributions, and between the floors of the core (DESIGN, section 3)."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys

import pytest

from .conftest import DISTRIBUTIONS, ROOT, ROOT_OF, names_in

FLOORS: dict[str, list[set[str]]] = {
    "agl_core": [
        {"types", "errors", "private"},
        {"store", "kinds", "protocols", "wire", "hooks", "plugins", "config", "processes", "decorators"},
        {"capture"},
        {"learning"},
        {"apis"},
        {"client"},
        {"builtin", "testing"},
        {"cli", "__main__", ""},  # "" is agl_core itself: what it re-exports
    ],
    "agl_server": [
        {"store", "http", "health", "engines"},
        {"gateway"},
        {"queue"},
        {"routes"},
        {"server"},
        {"training", "testing"},
        {"reading"},
        {"builtin"},
        {"commands"},
        {"runs", ""},
    ],
}

NEIGHBOURS = {
    "agl-core": set(),
    "agl-chat": {"agl_core", "agl_server"},
    "agl-otel": {"agl_core", "agl_server"},  # In the module with its route, which a server imports.
    "agl-online": {"agl_core", "agl_server"},
    "agl-prompts": {"agl_core", "agl_server"},
    "agl-view": {"agl_core", "agl_server"},
    "agl-torch": {"agl_core", "agl_server", "agl_algorithms", "agl_chat"},
    "agl-tinker": {"agl_core", "agl_server", "agl_algorithms", "agl_chat"},
    "agl-verl": {"agl_core", "agl_server", "agl_algorithms", "agl_chat"},
}
"""Packages of the repository that may be imported; anything else: agl_core alone."""

NOT_INSTALLED = {
    "haystack": ["haystack-ai"],
    "llama_index": ["llama-index-core"],
    "transfer_queue": ["TransferQueue"],
    "workflows": ["llama-index-workflows"],
}
"""Which distribution brings a package that is not in the environment of the tests, where the names differ."""

NEVER_IN_THE_CORE = {
    *("torch", "transformers", "peft", "openai"),
    *("langchain", "langchain_core", "langgraph", "crewai", "smolagents", "dspy"),
}


def floor_of(module: str) -> int:
    package, room, *_ = [*module.split("."), ""]
    floor = next((number for number, names in enumerate(FLOORS[package]) if room in names), None)
    if floor is None:
        pytest.fail(f"{module} is on no floor: add it to FLOORS here, and to DESIGN")
    return floor


@pytest.mark.parametrize("name", ["agl-core", "agl-server"])
def test_each_floor_imports_only_what_is_below(name: str) -> None:
    upward = [
        f"{i.line}: {i.importer} imports {i.target}"
        for i in DISTRIBUTIONS[name].imports
        if i.package == DISTRIBUTIONS[name].package and floor_of(i.importer) < floor_of(i.target)
    ]

    assert upward == []


def test_distributions_import_no_sibling() -> None:
    ours = {distribution.package for distribution in DISTRIBUTIONS.values()}
    sideways = [
        f"{i.line}: imports {i.target}"
        for name, distribution in DISTRIBUTIONS.items()
        for i in distribution.imports
        if i.package in ours - {distribution.package} - NEIGHBOURS.get(name, {"agl_core"})
    ]

    assert sideways == []


ROOMS_OF_THE_STORE = ("store", "gateway", "queue", "routes", "server", "health", "training", "reading", "testing")
HANDED_A_STORE = {
    *("agl_core.hooks", "agl_server.builtin"),  # Types of a hook, and registering SQLite.
    *("agl_otel.plugin", "agl_otel.intake"),  # A route of the server.
    *(f"agl_online.{name}" for name in ("sessions", "session", "experience", "trials", "learner", "policies")),
}
"""Other modules that work on a store. The apps' among them are parts of the server or of training."""


def test_commands_and_pages_read_runs_through_reading_alone() -> None:
    rooms = tuple(f"agl_server.{room}" for room in ROOMS_OF_THE_STORE)
    beside = [
        f"{i.line}: {i.importer} imports {i.target}"
        for distribution in DISTRIBUTIONS.values()
        for i in distribution.imports
        if i.target.startswith(("agl_core.store", "agl_server.store")) and not i.importer.startswith(rooms)
        if i.importer not in HANDED_A_STORE
    ]

    assert beside == []


REAL_USE = re.compile(
    r"real use|feedback|\bredact(?!ed_thinking)|canary|ledger|\[(online|learn)"
    r"|agl (learn|policy|serve|sessions|versions)\b",
    re.IGNORECASE,
)
"""All but the loop is an app: to the core a session is a rollout that is opened from outside."""


def test_the_core_names_no_sibling_and_nothing_of_real_use() -> None:
    """It learns from entry points what else is installed."""
    names = {name for d in DISTRIBUTIONS.values() for name in (d.project["name"], d.package)}
    siblings = re.compile(rf"\b({'|'.join(sorted(names - {'agl-core', 'agl_core', 'agl-server', 'agl_server'}))})\b")
    wrong = [
        f"{file.name}:{number}: {line.strip()}"
        for file in (*DISTRIBUTIONS["agl-core"].sources, *DISTRIBUTIONS["agl-server"].sources)
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if siblings.search(line) or REAL_USE.search(line)
    ]

    assert wrong == []


def test_the_core_imports_no_framework() -> None:
    """Except that its tools for tests use OpenAI's client, as agents do."""
    wrong = [
        i.line
        for i in DISTRIBUTIONS["agl-core"].imports
        if i.package in NEVER_IN_THE_CORE and not (i.importer.startswith("agl_core.testing") and i.package == "openai")
    ]

    assert wrong == []


def test_what_is_imported_is_declared() -> None:
    """Importing a module needs nothing but the distribution's own dependencies.

    The rooms `testing` may need the extra `testing`, and pytest for their fixtures.
    """
    providers = {**NOT_INSTALLED, **importlib.metadata.packages_distributions()}
    extra = _names(DISTRIBUTIONS["agl-core"].project["optional-dependencies"]["testing"]) | {"pytest"}
    undeclared = []
    for distribution in DISTRIBUTIONS.values():
        base = _names(distribution.project["dependencies"])
        if "agl-server" in base:
            base |= _names(DISTRIBUTIONS["agl-server"].project["dependencies"])
        for i in distribution.imports:
            if i.importer == "agl_otel.intake":  # A server imports it.
                continue
            if not i.always or i.package in sys.stdlib_module_names or i.package == distribution.package:
                continue
            allowed = base | extra if i.importer.startswith(("agl_core.testing", "agl_server.testing")) else base
            if not allowed & _names(providers.get(i.package, [i.package])):
                undeclared.append(f"{i.line}: {i.package}")

    assert sorted(undeclared) == []


def test_tests_in_other_environments_import_names_that_exist() -> None:
    """`make test` does not run what needs veRL, a GPU or another framework: a name that went would break it unseen."""
    files = [*ROOT.glob("*/*/tests/*.py"), *ROOT.glob("tests/conformance/**/*.py")]
    gone = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.module}.{name.name}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level and node.module and node.module.split(".")[0] in ROOT_OF
        for name in node.names
        if name.name not in names_in(node.module)
    ]

    assert gone == []


def _names(requirements: list[str]) -> set[str]:
    """Normalized names of distributions, from requirements like `agl-server>=1`."""
    names = {re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] for requirement in requirements}
    names |= {"pydantic-core"} if "pydantic" in names else set()
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}
