"""The page says what the drivers say; a third party's driver runs, and what is wrong with it is found."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agl_core.capture

from .apart import APART
from .driver import CHAT, MESSAGES, RESPONSES, Gap
from .drivers import DRIVERS
from .example_driver import TinyDriver
from .make_page import PAGE, render
from .scenarios import SCENARIOS, cells


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == render(page), "python -m tests.conformance.make_page"


def test_every_api_is_played_or_named_as_a_gap() -> None:
    for driver in (*DRIVERS, *APART):
        assert [*driver.apis, *driver.without] == [CHAT, RESPONSES, MESSAGES]


def test_scenarios_have_names_of_their_own_and_agents_known_by_their_prompts() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    for scenario in SCENARIOS:
        names = [agent.name for agent in scenario.everyone()]
        assert len(set(names)) == len(names)
        assert {turn.agent for turn in scenario.turns()} == set(names)


HERE = Path(__file__).parent


@pytest.mark.storm
def test_one_command_plays_the_driver_of_a_third_party(tmp_path: Path) -> None:
    shutil.copy(HERE / "example_driver.py", tmp_path / "their_module.py")
    command = [sys.executable, "-m", "pytest", HERE / "test_conformance_cells.py", "-q", "-rA"]
    played = subprocess.run(
        [*command, "--driver", "their_module:TinyDriver", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert played.returncode == 0, played.stdout
    assert len(re.findall(r"PASSED .*test_cell\[tiny \|", played.stdout)) == 17
    assert played.stdout.count("PASSED") == 17


class Nameless(TinyDriver):
    """Does not say who calls."""

    @contextlib.contextmanager
    def attached(self, form: str) -> Iterator[None]:
        with super().attached(form), pytest.MonkeyPatch.context() as patch:
            patch.setattr(agl_core.capture, "identify", lambda agent: contextlib.nullcontext())
            yield


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_wrong_with_a_driver_is_found(bench: Any, cell_of: Any) -> None:
    with pytest.raises(AssertionError, match="the agent of"):
        await bench.check(cell_of(Nameless(), "parallel tools"))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_gap_that_passes_is_refused(bench: Any, cell_of: Any) -> None:
    class Modest(TinyDriver):
        gaps = (*TinyDriver.gaps, Gap("parallel tools", "We thought so."))

    with pytest.raises(AssertionError, match="although it is declared a gap"):
        await bench.check(cell_of(Modest(), "parallel tools"))
    await bench.check(cell_of(Modest(), "fifteen tool calls"))


def test_a_gap_that_covers_nothing_is_refused() -> None:
    class Careless(TinyDriver):
        gaps = (Gap("parallel tolls", "A slip."),)

    with pytest.raises(ValueError, match="parallel tolls"):
        list(cells([Careless()]))
