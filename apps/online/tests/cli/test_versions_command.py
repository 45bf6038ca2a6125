"""`agl versions`: what it lists, and what an operator may decide by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agl_command import Agl, agl_in_process  # noqa: F401
from typer.testing import CliRunner

from agl_core.errors import CheckpointError, ConfigError
from agl_online.cli.policy import policy
from agl_online.cli.versions import versions
from agl_online.ledger import By, Ledger, LedgerError, State
from agl_online.policies.naming import parse

from ..policies.saved_runs import make_run
from ..versions.deployed_runs import DEFAULT, decide, make_deployed


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    found = make_deployed(tmp_path / "runs" / "calc", 10, 20, 30)
    gate = {"eval/greedy/reward/mean": 0.9, "eval/sampled/reward/mean": 0.8, "other/greedy/reward/mean": 0.1}
    decide(found, 10, State.CANDIDATE, By.TRAINING)
    decide(found, 10, State.PASSED, By.GATE, gate)
    decide(found, 10, State.CANARY, By.CANARY)
    return found


def agl(*arguments: str) -> str:
    """What the command prints; what it raises is raised here."""
    found = CliRunner().invoke(versions, [*arguments], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def listed() -> dict[int, dict[str, Any]]:
    return {each["step"]: each for each in json.loads(agl("list", "calc", "--json"))}


def test_the_list_shows_states_and_the_figures_behind_them(ledger: Ledger) -> None:
    ledger.note(
        DEFAULT, 10, {"canary/reward": 0.7, "canary/sessions": 12.0, "stable/reward": 0.4, "stable/sessions": 99.0}
    )
    found = listed()
    assert {step: each["state"] for step, each in found.items()} == {0: "stable", 10: "canary"}
    assert [found[10][key] for key in ("name", "greedy", "sampled", "live", "sessions")] == [
        "calc@10",
        0.9,
        0.8,
        0.7,
        12,
    ]
    assert [found[0][key] for key in ("greedy", "live", "sessions")] == [None, 0.4, 99]
    assert [each["state"] for each in found[10]["decisions"]] == ["candidate", "passed", "canary"]
    assert found[10]["decisions"][1]["figures"]["other/greedy/reward/mean"] == 0.1
    table = agl("list", "calc")
    assert [word for word in ("calc@10", "canary", "0.900", "0.700", "12") if word not in table] == []

    decide(ledger, 10, State.ROLLED_BACK, By.CANARY, {"canary/reward": 0.2, "canary/sessions": 40.0})
    after = listed()
    assert [after[10][key] for key in ("state", "live", "sessions", "by")] == ["rolled_back", 0.2, 40, "canary"]
    assert after[0]["live"] is None, "there is no canary to compare with"


def test_an_operator_promotes_pins_and_rolls_back(ledger: Ledger) -> None:
    assert "calc@10 is the stable version" in agl("promote", "calc", "--reason", "Looks good.")
    assert {step: each["state"] for step, each in listed().items()} == {0: "retired", 10: "stable"}
    assert listed()[10]["reason"] == "Looks good."
    assert listed()[0]["since"] == pytest.approx(listed()[10]["since"]), "it retired when the other came"
    assert "calc@20 is the stable version" in agl("promote", "calc@20", "--untested")
    assert "calc@10 is pinned" in agl("pin", "calc@10")
    assert {step: each["state"] for step, each in listed().items()} == {0: "retired", 10: "pinned", 20: "stable"}
    assert "calc@20 is the stable version" in agl("unpin", "calc")
    assert "calc@20 is rolled back" in agl("rollback", "calc")
    assert "calc@10 is rolled back" in agl("rollback", "calc@10")
    assert {step: each["state"] for step, each in listed().items()} == {
        0: "stable",
        10: "rolled_back",
        20: "rolled_back",
    }
    assert parse("calc@stable").resolve().step == 0


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("promote", "calc@99"), CheckpointError, r"There is no calc@99\."),
        (("promote", "calc@20"), LedgerError, "The gate did not pass it"),
        (("promote", "calk@20"), ConfigError, r"There is no run 'calk'\. Did you mean calc"),
        (("rollback", "calc@20"), LedgerError, "answers no sessions"),
        (("rollback", "calc@0"), LedgerError, "nothing to roll back to"),
        (("unpin", "calc"), LedgerError, "No version of 'default' is pinned"),
        (("list", "plain"), LedgerError, "was never deployed: it has no ledger"),
        (("promote", "plain@5"), LedgerError, "marked by `agl policy promote`"),
    ],
)
def test_mistakes_say_what_to_do(
    ledger: Ledger, tmp_path: Path, arguments: tuple[str, ...], error: type[Exception], says: str
) -> None:
    make_run(tmp_path / "runs" / "plain", {5: None})
    with pytest.raises(error, match=says):
        agl(*arguments)


def test_nothing_waits_to_be_promoted(ledger: Ledger) -> None:
    agl("rollback", "calc")
    with pytest.raises(LedgerError, match="No version of calc waits to be promoted"):
        agl("promote", "calc")


def test_a_deployed_run_is_not_marked_past_its_gate(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="agl versions promote calc@20"):
        CliRunner().invoke(policy, ["promote", "calc@20"], catch_exceptions=False)


PLUGIN = """
from pathlib import Path
Path(__file__).with_name("it-ran").touch()
"""


@pytest.mark.parametrize(
    "command",
    [
        *("sessions list RUN", "sessions delete RUN s1", "sessions key RUN shop", "versions list RUN", "policy list"),
        *("policy export calc@10 --out policy", "policy merge calc@10 --out merged", "policy serve calc@10"),
    ],
)
def test_no_code_of_the_run_runs(ledger: Ledger, agl: Agl, command: str) -> None:
    (ledger.run / "plugin.py").write_text(PLUGIN)
    config = ledger.run / "config.toml"
    config.write_text('plugins = ["plugin.py"]\n' + config.read_text())
    agl(*command.replace("RUN", "calc").split())
    assert not (ledger.run / "it-ran").exists()
