"""`agl plot` of a deployed run: what users said, session by session, and when versions were promoted."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ET
from pathlib import Path

from agl_core.analysis.curves.use import read_use
from agl_core.deployment.ledger import Ledger
from agl_core.testing.fixtures import Agl, agl_in_process  # noqa: F401

from .deployed_runs import make_deployed, make_stable
from .sessions_of_use import sessions


async def used(run: Path) -> None:
    """A hundred sessions with complaints, a promotion, a hundred with praise, and 140 without feedback."""
    ledger = make_deployed(run, 4)
    async with sessions(run) as users:
        for number in range(100):
            await users.end(thumbs=None if number % 2 else 0.0)
        make_stable(ledger, 4)
        for number in range(240):
            await users.end(thumbs=1.0 if number < 100 else None)


async def test_feedback_is_averaged_over_sessions_and_promotions_are_among_them(tmp_path: Path) -> None:
    await used(tmp_path / "shop")

    use = await read_use(tmp_path / "shop", Ledger.of_run(tmp_path / "shop").promotions())

    assert use.feedback == [(100, 0.0), (200, 1.0)], "a window without feedback says nothing"
    assert use.promotions == [100]


def test_it_is_drawn_though_nothing_was_trained(working_folder: Path, agl: Agl) -> None:
    asyncio.run(used(working_folder / "runs" / "shop"))

    done = agl("plot", "shop")

    assert done.returncode == 0, done.stderr
    axes = [each for each in ET.parse("curves.svg").getroot().iter() if each.get("id", "").startswith("axes_")]
    assert len(axes) == 1
