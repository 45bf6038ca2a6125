"""Fixtures that run `agl` commands in this process: import those that you want into your module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from subprocess import CompletedProcess
from typing import TypeAlias

import pytest

Agl: TypeAlias = Callable[..., CompletedProcess[str]]


@pytest.fixture(name="agl")
def agl_in_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> Agl:
    """Runs an `agl` command in this process, from its first line to the exit status; a process takes a second more."""
    [command] = entry_points(group="console_scripts", name="agl")
    main = command.load()

    def run(*arguments: str) -> CompletedProcess[str]:
        # A process would have no modules of other tests, and those of its own folder first.
        _forget_modules_in(tmp_path_factory.getbasetemp())
        for file in Path.cwd().glob("*.py"):
            monkeypatch.delitem(sys.modules, file.stem, raising=False)
        monkeypatch.setattr(sys, "argv", ["agl", *arguments])
        status: object = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
        output = capsys.readouterr()
        return CompletedProcess(["agl", *arguments], int(str(status)), output.out, output.err)

    return run


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The test's folder as the one in which a user runs a command here; what is imported from it goes with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    _forget_modules_in(tmp_path)


def _forget_modules_in(folder: Path) -> None:
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{folder}/"):
            del sys.modules[name]
