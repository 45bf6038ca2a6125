"""A new user looks at the first training while it runs, in a real browser: from the curve to one advantage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..support.chromium import CHROMIUM, MISSING, Page, opened

pytestmark = [pytest.mark.storm, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with opened(tmp_path / "browser") as found:
        found.look()
        yield found
        assert not found.complaints


def test_from_the_reward_curve_to_the_reason_for_one_advantage_in_four_clicks(agl: Any, page: Page) -> None:
    training = agl.start(*agl.calc("train.steps=40", "eval.every=0", "train.groups_per_step=4", "train.group_size=8"))
    training.until(lambda: "step   8/40" in training.output())  # By now some tasks are sometimes solved.
    address = re.search(r"view: +(\S+)", training.output())
    assert address is not None
    page.open(address[1].replace("/runs/calc?", "/?"))

    page.click("document.querySelector('th a[href=\"/runs/calc\"]')")
    page.until("location.pathname === '/runs/calc' && document.querySelector('.live')")
    page.until("document.querySelector('.badge').innerText === 'running'")
    reward = "document.querySelector('svg.chart[aria-label^=\"Reward.\"]')"
    page.until(f"{reward} && {reward}.querySelector('a[href*=\"step=8&\"]')")
    page.click(f"{reward}.querySelector('a[href*=\"step=8&\"]')")
    page.until("location.pathname === '/runs/calc/rollouts' && document.querySelector('.groups')")
    task = "[...document.querySelectorAll('.groups > li')].find((it) => !it.innerText.includes('no contrast'))"
    page.click(f"{task}.querySelector('.task a')")
    page.until("location.pathname.startsWith('/runs/calc/groups/s8-g') && document.querySelector('mark')")
    page.click("document.querySelector('table.aligned thead a')")
    page.until("location.pathname.startsWith('/runs/calc/rollouts/s8-g') && document.querySelector('.ledger')")

    said = page.run("document.querySelector('main').innerText")
    [(mean, deviation)] = re.findall(r"mean (\S+), deviation (\S+) over 8 rollouts", said)
    credit, advantage = (re.findall(rf"{name}\s+\+?(\S+)", said)[0] for name in ("credit", "advantage"))
    assert float(advantage) == pytest.approx((float(credit) - float(mean)) / float(deviation), abs=1e-3)
    assert re.search(r"answer\s+rule answer\s+1\s+1", said), "the rule that gave the reward, its value and its weight"
    assert "calculator" in said
    assert training.process.poll() is None, "it still trains"
