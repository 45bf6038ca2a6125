"""Names that are promised are there, and are described."""

from __future__ import annotations

import doctest
import importlib
import inspect
from typing import Any

import pytest

import agl_core

CONSTANTS = {"__version__"}


@pytest.mark.parametrize("name", sorted(set(agl_core.__all__) - CONSTANTS))
def test_every_public_name_exists_and_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(agl_core, name))


def test_tab_completion_offers_the_public_names() -> None:
    assert dir(agl_core) == sorted(agl_core.__all__)


def test_the_version_is_that_of_the_distribution(distributions: dict[str, Any]) -> None:
    assert agl_core.__version__ == distributions["agl-core"].project["version"]


def test_every_example_in_a_docstring_is_true(distributions: dict[str, Any]) -> None:
    ran = 0
    for distribution in distributions.values():
        for file in distribution.sources:
            if ">>> " in file.read_text():
                module = ".".join(file.relative_to(distribution.folder).with_suffix("").parts)
                result = doctest.testmod(importlib.import_module(module.removesuffix(".__init__")))
                assert result.failed == 0, f"the examples in {file} are wrong; see above"
                ran += result.attempted

    assert ran > 0
