"""The matrix's bench, and the option by which a third party brings a driver."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio

from ..support.testing_aids import fast_clients
from .driver import Cell, Driver
from .playing import Bench, running_bench
from .scenarios import cells


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--driver",
        metavar="MODULE:CLASS",
        help="play the conformance scenarios with this driver, instead of with agl's own",
    )


def chosen_drivers(config: pytest.Config) -> tuple[Driver, ...]:
    """The driver that `--driver` names, or agl's own."""
    # Without this folder on the command line, pytest knows no such option.
    name = config.getoption("--driver", default=None)
    if name is None:
        # A third party needs their own framework alone.
        from .drivers import DRIVERS

        return DRIVERS
    module, _, kind = name.partition(":")
    try:
        return (getattr(importlib.import_module(module), kind)(),)
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(
            f"--driver {name}: {error}. Name an importable module and its Driver: module:Class."
        ) from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        chosen, daily_share = list(cells(chosen_drivers(metafunc.config))), 1
        if metafunc.function.__name__ == "test_cell_alone":
            # A third party's framework may send its calls by a library that agl does not record.
            is_agls = metafunc.config.getoption("--driver", default=None) is None
            chosen, daily_share = [cell for cell in chosen if is_agls and cell.is_played_alone], 8
        by_scenario: dict[tuple[str, str], list[str]] = {}
        for cell in chosen:
            if cell.gap is None:
                by_scenario.setdefault((cell.driver.name, cell.scenario.name), []).append(str(cell))
        # In turn, so that a driver's APIs and forms all have their scenarios.
        played = [names[number % len(names)] for number, names in enumerate(by_scenario.values())]
        daily = set(played[::daily_share])
        marked = [
            pytest.param(cell, id=str(cell), marks=() if str(cell) in daily else pytest.mark.storm) for cell in chosen
        ]
        metafunc.parametrize("cell", marked)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    async with running_bench(tmp_path_factory.mktemp("conformance")) as running:
        yield running


@pytest.fixture(autouse=True, scope="module")
def no_waiting() -> Iterator[None]:
    with fast_clients():
        yield


@pytest.fixture
def cell_of() -> Callable[[Driver, str], Cell]:
    """The first cell of a driver and a scenario."""
    return lambda driver, scenario: next(cell for cell in cells([driver]) if cell.scenario.name == scenario)
