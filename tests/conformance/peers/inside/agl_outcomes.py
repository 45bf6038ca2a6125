"""A plugin of pytest that runs inside a suite: the suite's clients get agl's key, and how each test ended is written.

It knows nothing of agl or of this repository, whose `tests` would hide the suite's own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

_OUTCOMES: dict[str, str] = {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems() -> None:
    """Suites that write their key into their conftest.py get the one that they are given."""
    suite = sys.modules.get("tests.conftest")
    if hasattr(suite, "api_key"):
        suite.api_key = os.environ["OPENAI_API_KEY"]  # type: ignore[union-attr]


def pytest_runtest_logreport(report: Any) -> None:
    """The first phase that does not pass decides; the reason is the last line of what pytest shows of it."""
    if _OUTCOMES.get(report.nodeid, "passed") != "passed" or (report.when != "call" and report.passed):
        return
    shown = report.longrepr[-1] if isinstance(report.longrepr, tuple) else getattr(report.longrepr, "reprcrash", "")
    _OUTCOMES[report.nodeid] = "passed" if report.passed else f"{report.outcome}: {str(shown)[:600]}"


def pytest_sessionfinish() -> None:
    Path(os.environ["AGL_OUTCOMES"]).write_text(json.dumps(_OUTCOMES))
