"""Settings that the check lets through together do train."""

from __future__ import annotations

import pytest
from settings_bench import Bench

from agl_core.config import check


@pytest.mark.parametrize("algorithm", ["reinforce++", "ppo"])
async def test_groups_of_one_where_nothing_compares_them(algorithm: str, benches: tuple[Bench, Bench]) -> None:
    bench, _ = benches
    given = {"algorithm.name": algorithm, "train.group_size": 1}
    check(bench.load(given))
    progress = (await bench.run(given)).summary.progress
    assert progress.kept > 0
    assert progress.dropped == {}
