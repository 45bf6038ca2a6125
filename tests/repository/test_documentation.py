"""What the documentation says is what the code does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_is_up_to_date() -> None:
    command = [sys.executable, ROOT / "docs" / "make_configuration.py", "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
