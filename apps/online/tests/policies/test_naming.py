"""Versions of policies by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_core.errors import CheckpointError, ConfigError
from agl_online.policies.details import list_policies
from agl_online.policies.naming import aliases, list_versions, parse

from .saved_runs import add_checkpoint, make_run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def resolved(name: str) -> str:
    return str(parse(name).resolve())


def test_a_name_means_a_version_and_moves_with_the_run(tmp_path: Path) -> None:
    checkpoints = make_run(tmp_path / "runs" / "calc", {10: 0.5, 20: 0.9, 30: 0.4, 35: None})

    assert [resolved(each) for each in ("calc@10", "calc", "calc@latest", "calc@best", "calc@010")] == [
        *("calc@10", "calc@35", "calc@35", "calc@20", "calc@10")
    ]
    assert resolved(f"{tmp_path}/runs/calc@best") == "calc@20"
    assert parse("calc@20").resolve().saved == Path("runs/calc/checkpoints/step-000020/default/model")
    before = parse("calc@0").resolve()
    assert (before.checkpoint, before.saved) == (None, None)

    add_checkpoint(checkpoints, 40, 0.95, ["default"])
    assert (resolved("calc@latest"), resolved("calc@best")) == ("calc@40", "calc@40")


def test_what_is_marked_as_stable_is_kept(tmp_path: Path) -> None:
    checkpoints = make_run(tmp_path / "runs" / "calc", {10: 0.1, 20: 0.9}, keep=1)
    assert [str(each) for each in list_versions(Path("runs/calc"))] == ["calc@20"]
    with pytest.raises(CheckpointError, match=r"no version is marked.*agl policy promote calc@STEP"):
        resolved("calc@stable")

    add_checkpoint(checkpoints, 30, 0.2, ["default"])
    checkpoints.mark_stable("default", 30)
    for step in (40, 50):
        add_checkpoint(checkpoints, step, 0.3, ["default"])

    assert [str(each) for each in list_versions(Path("runs/calc"))] == ["calc@20", "calc@30", "calc@50"]
    assert resolved("calc@stable") == "calc@30"
    assert {str(each): list(aliases(each)) for each in list_versions(Path("runs/calc"))} == {
        "calc@20": ["best"],
        "calc@30": ["stable"],
        "calc@50": ["latest"],
    }


def test_of_several_policies_each_has_its_name(tmp_path: Path) -> None:
    models = {"solver": {"model": {"path": "a"}}, "critic": {"model": {"path": "b"}}}
    checkpoints = make_run(tmp_path / "runs" / "debate", {4: None}, policies=models)

    assert resolved("debate:solver") == "debate:solver@4"
    checkpoints.mark_stable("solver", 4)
    assert resolved("debate:solver@stable") == "debate:solver@4"
    with pytest.raises(CheckpointError, match="no version is marked"):
        resolved("debate:critic@stable")
    with pytest.raises(ConfigError, match=r"several policies.*debate:solver, debate:critic"):
        parse("debate@4")
    with pytest.raises(ConfigError, match=r"no policy 'solvr'\. Its policies: solver, critic"):
        parse("debate:solvr@4")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("calk@10", r"no run 'calk'\. Did you mean calc\?"),
        ("calc@11", r"no calc@11\. Did you mean calc@10\? Its versions: calc@10"),
        ("calc@lattest", r"Did you mean calc@latest\?"),
        ("calc@", "names no version"),
        ("calc@-1", "names no version"),
        ("@10", "no run ''"),
        ("young", "has no checkpoint"),
        ("young@best", "has no checkpoint"),
        ("calc@best", "was evaluated at its step"),
        ("caught", "trains no policy: it is a recording"),
        ("calc@stable", "is gone"),
    ],
)
def test_a_name_that_means_nothing_is_an_error_with_the_nearest_names(tmp_path: Path, name: str, said: str) -> None:
    make_run(tmp_path / "runs" / "calc", {10: None}).mark_stable("default", 5)
    make_run(tmp_path / "runs" / "young", {})
    (tmp_path / "runs" / "caught").mkdir()
    (tmp_path / "runs" / "caught" / "config.toml").write_text("[capture]\n")

    with pytest.raises((CheckpointError, ConfigError), match=said):
        resolved(name)


def test_a_damaged_mark_is_an_error(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "calc", {10: 0.5})
    (tmp_path / "runs" / "calc" / "stable.json").write_text('{"default": "ten"}')
    with pytest.raises(CheckpointError, match=r"stable\.json cannot be read"):
        resolved("calc@stable")


def test_the_list_has_the_evaluation_behind_each_version(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "calc", {10: 0.5, 20: 0.9})
    make_run(tmp_path / "runs" / "tuned", {5: None}, adapter=True)

    by_name = {each.name: each for each in list_policies(Path("runs"))}

    assert list(by_name) == ["calc@10", "calc@20", "tuned@5"]
    best, tuned = by_name["calc@20"], by_name["tuned@5"]
    assert best.headline is not None
    assert (best.headline.set, best.headline.mode, best.headline.reward, best.headline.rollouts) == (
        *("eval", "greedy", 0.9, 20),
    )
    assert (best.kind, best.aliases, best.size) == ("full", ["latest", "best"], len("default of step 20") + 2)
    assert (tuned.kind, tuned.headline) == ("adapter", None)
    assert [each.name for each in list_policies(Path("runs/tuned"))] == ["tuned@5"]
    with pytest.raises(ConfigError, match="There are no runs in elsewhere"):
        list_policies(Path("elsewhere"))
