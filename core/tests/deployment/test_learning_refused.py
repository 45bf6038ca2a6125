"""What `agl learn` refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_core.deployment.learner import learn
from agl_core.errors import ConfigError
from agl_core.training.progress import Silent


async def test_a_configuration_without_learn(tmp_path: Path) -> None:
    loaded: Any = SimpleNamespace(config=SimpleNamespace(learn=None))
    with pytest.raises(ConfigError, match=r"There is no \[learn\] in the configuration"):
        await learn(loaded, tmp_path, Silent())
