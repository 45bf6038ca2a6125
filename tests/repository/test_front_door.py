"""The front door: the metadata of the packages, the files that GitHub reads, and the names that are promised."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
from testing_aids import run_command

import agl_core

from .conftest import DISTRIBUTIONS, ROOT

GITHUB = {
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "dependabot": ".github/dependabot.yml",
    "citation-file-format": "CITATION.cff",
}
"""Schemas that check-jsonschema brings along, and the files that follow them."""
ON_LINUX_ALONE = {"agl-verl"}


def test_every_distribution_says_the_same_of_itself() -> None:
    first = DISTRIBUTIONS["agl-core"].project
    for name, distribution in DISTRIBUTIONS.items():
        for key in ("version", "license", "license-files", "authors", "urls", "requires-python", "readme"):
            assert distribution.project[key] == first[key], (name, key)
        ours = [need for need in distribution.project["dependencies"] if need.startswith("agl-")]
        assert [need for need in ours if not need.endswith(f"=={first['version']}")] == [], name
        systems = {"Operating System :: MacOS"} if name in ON_LINUX_ALONE else set()
        assert set(distribution.project["classifiers"]) | systems == set(first["classifiers"])
        assert (distribution.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
        assert '"hatchling>=1.27,<2"' in (distribution.folder / "pyproject.toml").read_text()


def test_one_address_of_the_repository_is_named() -> None:
    address = DISTRIBUTIONS["agl-core"].project["urls"]["Repository"]
    named = run_command("git", "grep", "-hoE", r"github\.com/[A-Za-z-]+/agl\b", cwd=ROOT).split()
    assert {f"https://{name}" for name in named} == {address}


@pytest.mark.parametrize("schema", GITHUB)
def test_files_that_github_reads_are_well_formed(schema: str) -> None:
    files = sorted(ROOT.glob(GITHUB[schema]))
    assert files
    run_command(Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema", f"vendor.{schema}", *files)


def test_workflows_pin_their_actions_and_call_targets_of_the_makefile() -> None:
    workflows = "".join(file.read_text() for file in (ROOT / ".github" / "workflows").glob("*.yml"))
    actions = re.findall(r"uses: ([^.\s]\S+)", workflows)
    targets = re.findall(r"\bmake ([a-z-]+)", workflows) + re.search(r"target: \[(.+)\]", workflows)[1].split(", ")
    makefile = (ROOT / "Makefile").read_text()

    assert actions
    assert [action for action in actions if not re.search(r"@(v|release/v)\d+$", action)] == []
    assert {"test", "dist", "storms"} <= set(targets)
    assert [target for target in targets if f"\n{target}: " not in makefile] == []


@pytest.mark.parametrize("name", sorted(set(agl_core.__all__) - {"__version__"}))
def test_every_public_name_exists_and_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(agl_core, name))


def test_tab_completion_offers_the_public_names() -> None:
    assert dir(agl_core) == sorted(agl_core.__all__)


def test_the_version_is_that_of_the_distribution() -> None:
    assert agl_core.__version__ == DISTRIBUTIONS["agl-core"].project["version"]


def test_every_example_in_a_docstring_is_true() -> None:
    ran = 0
    for distribution in DISTRIBUTIONS.values():
        for file in distribution.sources:
            if ">>> " in file.read_text():
                module = ".".join(file.relative_to(distribution.folder).with_suffix("").parts)
                result = doctest.testmod(importlib.import_module(module.removesuffix(".__init__")))
                assert result.failed == 0, f"the examples in {file} are wrong; see above"
                ran += result.attempted

    assert ran > 0
