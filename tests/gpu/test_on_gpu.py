"""The torch engine on a CUDA GPU, where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import agreement
from .models import CALC
from .parts import Setup, missing_gpu

MISSING = missing_gpu()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
async def test_the_gpu_computes_what_the_cpu_computes(tmp_path: Path) -> None:
    found = await agreement.compare(CALC, Setup("cuda", tmp_path))
    assert len(found.rows) == 2 * len(agreement.BOUNDS)
    assert found.beyond == []
