"""What is promised is there, and is described."""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import agl_core
from agl_core import kinds
from agl_core.config import RunConfig
from agl_core.plugins import Plugins

CONSTANTS = {"__version__"}


@pytest.mark.parametrize("name", sorted(set(agl_core.__all__) - CONSTANTS))
def test_every_public_name_exists_and_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(agl_core, name))


def test_the_version_is_that_of_the_distribution(distributions: dict[str, Any]) -> None:
    assert agl_core.__version__ == distributions["agl-core"].project["version"]


def described_fields(model: type[BaseModel], place: str) -> Iterator[tuple[str, str | None]]:
    """Every setting of a model and of the models inside it, with its description or its table's docstring."""
    for name, field in model.model_fields.items():
        inside = list(_models(field.annotation))
        yield f"{place}.{name}", field.description or (inside[0].__doc__ if inside else None)
        for each in inside:
            yield from described_fields(each, f"{place}.{name}")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def test_every_setting_of_a_run_is_described() -> None:
    assert [place for place, said in described_fields(RunConfig, "run") if not said] == []


def test_every_component_of_ours_and_all_its_settings_are_described() -> None:
    plugins = Plugins.load()
    missing = []
    for component in (each for kind in kinds.KINDS for each in plugins.components(kind).values()):
        if not component.origin.startswith("agl-"):
            continue
        place = f"{component.kind} {component.name}"
        if not component.doc:
            missing.append(place)
        missing += [where for where, said in described_fields(component.options, place) if not said]

    assert missing == []


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
