"""`agl view` as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .viewed_runs import Folder


@pytest.fixture
def view(runs: Folder) -> Iterator[subprocess.Popen[str]]:
    """`agl view` in the folder around ./runs."""
    process = subprocess.Popen(
        [Path(sys.executable).with_name("agl"), "view", "--no-browser"],
        cwd=runs.path.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    yield process
    process.kill()
    process.wait()


def printed_address(view: subprocess.Popen[str]) -> str:
    assert view.stdout is not None
    first = view.stdout.readline()
    found = re.fullmatch(r"view:  (http://127\.0\.0\.1:\d+/\?token=\S{30,})\n", first)
    assert found is not None, first
    return found[1]


def test_the_printed_address_opens_and_ctrl_c_ends_it(runs: Folder, view: subprocess.Popen[str]) -> None:
    runs.trained()
    address = printed_address(view)

    with httpx.Client(follow_redirects=True) as browser:
        assert browser.get(address.partition("?")[0]).status_code == 401
        assert "/runs/calc" in browser.get(address).text
    view.send_signal(signal.SIGINT)
    said, _ = view.communicate(timeout=60)

    assert view.returncode in (0, 130)
    assert "Traceback" not in said


def test_a_folder_without_runs_is_named(runs: Folder, tmp_path: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("agl"), "view", "nope", "--no-browser"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "nope is not a run's folder" in done.stderr
