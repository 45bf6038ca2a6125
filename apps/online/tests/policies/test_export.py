"""A version as a folder: whole or not at all."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from agl_core.errors import CheckpointError, ConfigError
from agl_core.training.checkpoints import Checkpoints
from agl_online.policies.export import export, merge
from agl_online.policies.naming import Version, parse

from .saved_runs import make_run


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\nlicense: mit\n")
    return folder


def version(tmp_path: Path, base: Path, *, adapter: bool) -> Version:
    make_run(tmp_path / "calc", {10: 0.25}, adapter=adapter, base=base)
    return parse(f"{tmp_path / 'calc'}@10").resolve()


def test_the_card_says_what_trained_it_on_what_and_how_it_was_evaluated(tmp_path: Path, base: Path) -> None:
    export(version(tmp_path, base, adapter=False), tmp_path / "out")

    card = (tmp_path / "out" / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["agl", "reinforcement-learning"],
    }
    for said in ("# calc@10", "| base model | base |", "grpo, credit identical", "train (jsonl)", "agent:solve"):
        assert said in card
    assert "| eval | greedy | 20 |  | 0.250 |" in card
    assert str(tmp_path) not in card, "a place on this machine is of no use elsewhere"
    assert (tmp_path / "out" / "weights").read_text() == "default of step 10"
    assert (tmp_path / "out").stat().st_mode & 0o077, "it is for others too"


def test_an_adapter_names_its_base_where_it_is(tmp_path: Path, base: Path) -> None:
    export(version(tmp_path, base, adapter=True), tmp_path / "out")

    described = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base)
    assert "AutoPeftModelForCausalLM" in (tmp_path / "out" / "README.md").read_text()


def test_nothing_is_written_where_something_is_wrong(tmp_path: Path, base: Path) -> None:
    made = version(tmp_path, base, adapter=True)
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(ConfigError, match="exists"):
        export(made, taken)
    with pytest.raises(ConfigError, match="what training started from"):
        export(parse(f"{tmp_path / 'calc'}@0").resolve(), tmp_path / "out")
    (base / "README.md").unlink()
    base.rmdir()
    with pytest.raises(ConfigError, match=r"there is no folder.*--set policies\.default\.model\.path"):
        merge(made, tmp_path / "out")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["calc", "taken"]


def test_what_training_removes_meanwhile_is_said(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = version(tmp_path, base, adapter=False)

    def copy(*files: Any) -> None:
        Checkpoints(tmp_path / "calc" / "checkpoints", keep=1).forget_after(9)
        raise FileNotFoundError(files)

    monkeypatch.setattr("shutil.copyfile", copy)
    with pytest.raises(CheckpointError, match="was removed while it was read"):
        export(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_merging_needs_an_adapter_and_an_engine(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(ConfigError, match=r"nothing to merge.*agl policy export calc@10"):
        merge(version(tmp_path, base, adapter=False), tmp_path / "out")
    make_run(tmp_path / "tuned", {10: 0.25}, adapter=True, base=base)
    tuned = parse(f"{tmp_path / 'tuned'}@10").resolve()
    with pytest.raises(ConfigError, match="No engine 'other' is installed here that serves and merges"):
        merge(tuned, tmp_path / "out", engine="other")
    assert not list(temporary.iterdir()), "without a log there is nothing to keep"
    assert not (tmp_path / "out").exists()
