"""agl-verl is installed for these tests, without what it runs on."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _agl_verl(agl_verl_is_installed: None) -> None:
    """Configurations of the veRL engine are read in all of them."""
