"""The ledger and `agl versions`: what may become of versions, and that no kill and no second writer breaks it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from agl_core.errors import AglError
from agl_online.cli import versions
from agl_online.policies import Version
from agl_online.versions import By, Ledger, LedgerError, State
from agl_server.training.checkpoints import CHECKPOINTS, VERSIONS_FILE, Checkpoints, RunState

from ..policies.saved_runs import make_run
from .deployed_runs import decide, make_canary, make_deployed, make_passed, make_stable


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return make_deployed(tmp_path / "runs" / "calc", 10, 20, 30)


def states(ledger: Ledger) -> dict[int, State | None]:
    standing = ledger.current()
    return {step: standing.state(step) for step in sorted(standing.decided)}


def agl(*arguments: str) -> str:
    """The command's output; its error is raised here."""
    result = CliRunner().invoke(versions, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_version_goes_from_candidate_to_stable_and_the_one_before_retires(ledger: Ledger) -> None:
    make_canary(ledger, 10)
    assert states(ledger) == {0: State.STABLE, 10: State.CANARY}
    assert ledger.current().serving == [0, 10]

    decide(ledger, 10, State.STABLE, By.CANARY, {"canary/reward": 0.5, "nothing": float("nan")})
    decide(ledger, 20, State.CANDIDATE, By.TRAINING)
    decide(ledger, 20, State.REJECTED)

    assert states(ledger) == {0: State.RETIRED, 10: State.STABLE, 20: State.REJECTED}
    decisions = Ledger(ledger.run).decisions()
    assert [(decision.step, decision.state, decision.by) for decision in decisions[:2]] == [
        (0, State.STABLE, By.START),
        (10, State.CANDIDATE, By.TRAINING),
    ]
    assert decisions[4].figures == {"canary/reward": 0.5}, "what is no number is left out"
    assert Version.find("calc@stable").step == 10


def test_an_operator_promotes_rolls_back_and_sees_why(ledger: Ledger) -> None:
    make_canary(ledger, 10)
    assert "calc@10 is the stable version" in agl("promote", "calc", "--reason", "Looks good.")
    make_passed(ledger, 20)
    assert "calc@20 is the stable version" in agl("promote", "calc@20")
    listed: list[dict[str, Any]] = json.loads(agl("list", "calc", "--json"))
    assert [(version["name"], version["state"]) for version in listed] == [
        ("calc@0", "retired"), ("calc@10", "retired"), ("calc@20", "stable"),
    ]  # fmt: skip
    assert [decision["state"] for decision in listed[1]["decisions"]] == ["candidate", "passed", "canary", "stable"]
    table = agl("list", "calc")
    assert [word for word in ("calc@10", "retired", "operator", "Looks good.") if word not in table] == []

    assert "calc@20 is rolled back" in agl("rollback", "calc")
    assert Version.find("calc@stable").step == 10
    assert "calc@10 is rolled back" in agl("rollback", "calc@10")
    assert Version.find("calc@stable").checkpoint is None
    assert states(ledger) == {0: State.STABLE, 10: State.ROLLED_BACK, 20: State.ROLLED_BACK}
    assert decide(ledger, 20, State.STABLE, By.OPERATOR).stable == 20, "an operator may take it back"


@pytest.mark.parametrize(
    ("step", "state", "by", "says"),
    [
        (40, State.CANDIDATE, By.TRAINING, "There is no checkpoint of step 40"),
        (20, State.CANARY, By.CANARY, "The gate did not pass it"),
        (20, State.STABLE, By.OPERATOR, "The gate did not pass it"),
        (30, State.STABLE, By.CANARY, "It is passed and not the canary any more"),
        (30, State.CANARY, By.CANARY, "Version 10 is the canary; there is one at a time"),
        (10, State.CANDIDATE, By.TRAINING, "It is canary now, and answers sessions"),
        (0, State.STABLE, By.OPERATOR, "It is stable already"),
        (0, State.STABLE, By.START, "Version 0 is stable already"),
        (0, State.ROLLED_BACK, By.CANARY, "It is stable and not the canary any more"),
        (0, State.ROLLED_BACK, By.OPERATOR, "nothing to roll back to"),
        (30, State.ROLLED_BACK, By.OPERATOR, "It is passed, and answers no sessions"),
        (20, State.ROLLED_BACK, By.OPERATOR, "It is unknown, and answers no sessions"),
    ],
)
def test_what_makes_no_sense_is_refused_and_not_written(
    ledger: Ledger, step: int, state: State, by: By, says: str
) -> None:
    make_canary(ledger, 10)
    make_passed(ledger, 30)
    before = ledger.file.read_bytes()
    with pytest.raises(LedgerError, match=says):
        decide(ledger, step, state, by)
    assert ledger.file.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("promote", "calc@99"), "no checkpoint step-000099"),
        (("promote", "calc"), "none waits"),
        (("rollback", "plain"), "never deployed"),
        (("rollback", "calk@20"), "calk is not a run's folder"),
    ],
)
def test_mistakes_of_the_operator_are_said(
    ledger: Ledger, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    make_run(tmp_path / "runs" / "plain", {5: None})
    with pytest.raises(AglError, match=says):
        agl(*arguments)


def test_checkpoints_that_are_needed_outlive_later_ones(tmp_path: Path) -> None:
    ledger = make_deployed(tmp_path / "calc", 10, 20, 30, 40, keep=100)
    make_stable(ledger, 10)
    make_stable(ledger, 20)
    make_canary(ledger, 30)
    checkpoints = Checkpoints(ledger.run / CHECKPOINTS, keep=1)
    part = checkpoints.begin(50)
    (part / "default" / "model").mkdir(parents=True)
    checkpoints.commit(part, RunState(step=50))

    assert [path.name for path in checkpoints.all()] == [f"step-0000{step}" for step in (10, 20, 30, 50)]
    decide(ledger, 30, State.ROLLED_BACK, By.CANARY)
    assert [path.name for path in checkpoints.prune()] == ["step-000030"]


def test_a_half_written_line_was_never_decided(ledger: Ledger) -> None:
    make_canary(ledger, 10)
    whole = ledger.file.read_bytes()
    promoted = orjson.dumps({"step": 10, "state": "stable", "by": "canary", "reason": "", "time": 1.0})
    for length in (1, len(promoted) // 2, len(promoted)):
        ledger.file.write_bytes(whole + promoted[:length])
        assert ledger.current().canary == 10
        assert Version.find("calc@stable").step == 0

    decide(ledger, 10, State.ROLLED_BACK, By.CANARY)

    assert ledger.file.read_bytes().startswith(whole)
    assert [decision.state for decision in ledger.decisions()][-2:] == [State.CANARY, State.ROLLED_BACK]
    ledger.file.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(LedgerError, match=f"Line 1 of .*{VERSIONS_FILE} is no decision"):
        ledger.current()


WRITER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from agl_online.versions import By, Decision, Ledger, LedgerError, State

    ledger, step, turns = Ledger(Path(sys.argv[1])), int(sys.argv[2]), 0
    while turns < 10:
        try:
            ledger.record(Decision(step, State.CANARY, By.CANARY, "x" * 2000))
        except LedgerError:  # The other writer has its turn.
            continue
        ledger.record(Decision(step, State.ROLLED_BACK, By.CANARY, "x" * 2000))
        turns += 1
""")


def test_two_writers_never_make_two_canaries(ledger: Ledger) -> None:
    for step in (10, 20):
        make_passed(ledger, step)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(ledger.run), str(step)]) for step in (10, 20)]
    assert [writer.wait(60) for writer in writers] == [0, 0]

    decisions = ledger.decisions()[5:]
    for canary, rolled_back in zip(decisions[::2], decisions[1::2], strict=True):
        assert (canary.state, rolled_back.state) == (State.CANARY, State.ROLLED_BACK)
        assert canary.step == rolled_back.step
    assert len(decisions) == 40
