"""Which storms a change concerns: what CI runs besides `make test`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def selection() -> ModuleType:
    spec = importlib.util.spec_from_file_location("affected_storms", Path(__file__).with_name("affected_storms.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "path",
    ["core/agl_core/store/sqlite.py", "core/tests/server/posting.py", "constraints.txt", "conftest.py", "new/x.py"],
)
def test_what_everything_rests_on_concerns_all(selection: ModuleType, path: str) -> None:
    assert selection.affected(["docs/a.py", path]) == list(selection.EVERYWHERE)


def test_areas_add_up_and_pages_concern_none_but_those_of_the_tutorial(selection: ModuleType) -> None:
    assert selection.affected(["README.md", "core/README.md", "docs/faults.md"]) == []
    assert selection.affected(["docs/tutorial/3-train.md"]) == ["tests/tutorial"]
    alone = [set(selection.affected([path])) for path in ("adapters/otel/x.py", "rewards/x.py")]
    assert set(selection.affected(["adapters/otel/x.py", "rewards/x.py"])) == alone[0] | alone[1]


def test_every_named_place_is_there(selection: ModuleType, root: Path) -> None:
    named = {
        *selection.EVERYWHERE,
        *selection.STORMS,
        *(each for places in selection.STORMS.values() for each in places),
    }
    assert [each for each in sorted(named) if not (root / each).is_dir()] == []
