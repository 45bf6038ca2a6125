"""The notebook runs from its first cell to its last, and the policy learns in it."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1]


@pytest.mark.storm
@pytest.mark.timeout(600)
def test_the_notebook_runs_and_its_policy_learns(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "calc", tmp_path / "calc")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": tmp_path}}).execute()
    shown = [str(cell.get("outputs")) for cell in notebook.cells]
    assert "word='learned'" in shown[1]
    assert "terminal reward: 1" in shown[6]
