"""The ledger: what it lets happen to versions, and that no kill and no second writer breaks it."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import orjson
import pytest

from agl_core.training.checkpoints import CHECKPOINTS, Checkpoints, RunState
from agl_online.ledger import LEDGER_FILE, By, Ledger, LedgerError, State
from agl_online.policies.naming import parse

from .deployed_runs import DEFAULT, decide, make_canary, make_deployed, make_stable


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_deployed(tmp_path / "calc", 10, 20, 30)


def states(ledger: Ledger) -> dict[int, State | None]:
    standing = ledger.current(DEFAULT)
    return {step: standing.state(step) for step in sorted(standing.decided)}


def test_a_version_goes_from_candidate_to_stable_and_the_one_before_retires(ledger: Ledger) -> None:
    make_canary(ledger, 10)
    assert states(ledger) == {0: State.STABLE, 10: State.CANARY}
    assert ledger.current(DEFAULT).serving == [0, 10]

    decide(ledger, 10, State.STABLE, By.CANARY, {"canary/reward": 0.5, "nothing": float("nan")})
    decide(ledger, 20, State.CANDIDATE, By.TRAINING)
    decide(ledger, 20, State.REJECTED)

    assert states(ledger) == {0: State.RETIRED, 10: State.STABLE, 20: State.REJECTED}
    read = Ledger.of_run(ledger.run).decisions(DEFAULT)
    assert [(each.step, each.state, each.by) for each in read[:2]] == [
        (0, State.STABLE, By.START),
        (10, State.CANDIDATE, By.TRAINING),
    ]
    assert read[4].figures == {"canary/reward": 0.5}, "what is no number is left out"
    assert parse(f"{ledger.run}@stable").resolve().step == 10


def test_a_stable_version_that_is_rolled_back_gives_way_to_the_one_before(ledger: Ledger) -> None:
    make_stable(ledger, 10)
    make_stable(ledger, 20)
    assert decide(ledger, 20, State.ROLLED_BACK, By.OPERATOR).stable == 10
    assert parse(f"{ledger.run}@stable").resolve().step == 10
    assert decide(ledger, 10, State.ROLLED_BACK, By.OPERATOR).stable == 0
    assert parse(f"{ledger.run}@stable").resolve().checkpoint is None
    with pytest.raises(LedgerError, match="nothing to roll back to"):
        decide(ledger, 0, State.ROLLED_BACK, By.OPERATOR)
    assert states(ledger) == {0: State.STABLE, 10: State.ROLLED_BACK, 20: State.ROLLED_BACK}
    assert decide(ledger, 20, State.STABLE, By.OPERATOR).stable == 20, "an operator may take it back"


@pytest.mark.parametrize(
    ("step", "state", "by", "says"),
    [
        (40, State.CANDIDATE, By.TRAINING, "There is no checkpoint of step 40. There are: 0, 10, 20, 30"),
        (20, State.CANARY, By.CANARY, "The gate did not pass it"),
        (20, State.STABLE, By.OPERATOR, "The gate did not pass it.*--untested"),
        (30, State.STABLE, By.CANARY, "It is passed and not the canary any more"),
        (30, State.CANARY, By.CANARY, "Version 10 is the canary; there is one at a time"),
        (10, State.CANDIDATE, By.TRAINING, "It is canary now, and answers sessions"),
        (0, State.STABLE, By.OPERATOR, "It is stable already"),
        (0, State.STABLE, By.START, "Version 0 is stable already"),
        (0, State.ROLLED_BACK, By.CANARY, "It is stable and not the canary any more"),
        (30, State.ROLLED_BACK, By.OPERATOR, "It is passed, and answers no sessions"),
        (20, State.ROLLED_BACK, By.OPERATOR, "It is unknown, and answers no sessions"),
    ],
)
def test_what_makes_no_sense_is_refused_and_not_written(
    ledger: Ledger, step: int, state: State, by: By, says: str
) -> None:
    make_canary(ledger, 10)
    decide(ledger, 30, State.CANDIDATE, By.TRAINING)
    decide(ledger, 30, State.PASSED)
    before = ledger.file.read_bytes()

    with pytest.raises(LedgerError, match=says):
        decide(ledger, step, state, by)

    assert ledger.file.read_bytes() == before


def test_an_operator_may_take_what_was_not_tested_and_nobody_else(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="The gate did not pass it"):
        decide(ledger, 20, State.CANARY, By.CANARY, untested=True)
    assert decide(ledger, 20, State.STABLE, By.OPERATOR, untested=True).stable == 20
    with pytest.raises(LedgerError, match=r"has no policy 'solver'\. Known: default"):
        ledger.current("solver")
    ledger.file.unlink()
    with pytest.raises(LedgerError, match="never deployed"):
        decide(ledger, 10, State.CANDIDATE, By.TRAINING)


def test_a_pin_holds_everything_until_it_ends(ledger: Ledger) -> None:
    make_canary(ledger, 10)
    decide(ledger, 20, State.CANDIDATE, By.TRAINING)
    decide(ledger, 20, State.PASSED)
    standing = decide(ledger, 0, State.PINNED, By.OPERATOR)
    assert standing.serving == [0]
    assert states(ledger) == {0: State.PINNED, 10: State.CANARY, 20: State.PASSED}
    for step, state, by in ((10, State.STABLE, By.CANARY), (20, State.PINNED, By.OPERATOR)):
        with pytest.raises(LedgerError, match="Version 0 is pinned"):
            decide(ledger, step, state, by)
    with pytest.raises(LedgerError, match="It is pinned: agl versions unpin"):
        decide(ledger, 0, State.ROLLED_BACK, By.OPERATOR)

    decide(ledger, 10, State.ROLLED_BACK, By.CANARY)
    ledger.unpin(DEFAULT, "Seen enough.")

    assert states(ledger) == {0: State.STABLE, 10: State.ROLLED_BACK, 20: State.PASSED}
    with pytest.raises(LedgerError, match="No version of 'default' is pinned"):
        ledger.unpin(DEFAULT, "Again.")


def test_checkpoints_that_are_needed_outlive_later_ones(tmp_path: Path) -> None:
    ledger = make_deployed(tmp_path / "calc", 10, 20, 30, 40, keep=100)
    make_stable(ledger, 10)
    make_stable(ledger, 20)
    make_canary(ledger, 30)
    checkpoints = Checkpoints(ledger.run / CHECKPOINTS, keep=1)
    part = checkpoints.begin(50)
    (part / DEFAULT / "model").mkdir(parents=True)
    checkpoints.commit(part, RunState(step=50))

    assert [each.name for each in checkpoints.all()] == [f"step-0000{step}" for step in (10, 20, 30, 50)]
    decide(ledger, 30, State.ROLLED_BACK, By.CANARY)
    assert [each.name for each in checkpoints.prune()] == ["step-000030"]


def test_a_half_written_line_was_never_decided(ledger: Ledger) -> None:
    make_canary(ledger, 10)
    whole = ledger.file.read_bytes()
    promoted = orjson.dumps(
        {"policy": DEFAULT, "step": 10, "state": "stable", "by": "canary", "reason": "", "time": 1.0}
    )
    for length in (1, len(promoted) // 2, len(promoted)):
        ledger.file.write_bytes(whole + promoted[:length])
        assert ledger.current(DEFAULT).canary == 10
        assert Ledger.of_run(ledger.run).decisions() == ledger.decisions()

    decide(ledger, 10, State.ROLLED_BACK, By.CANARY)

    assert ledger.file.read_bytes().startswith(whole)
    assert [each.state for each in ledger.decisions()][-2:] == [State.CANARY, State.ROLLED_BACK]
    ledger.file.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(LedgerError, match=f"Line 1 of .*{LEDGER_FILE} is no decision"):
        ledger.current(DEFAULT)


KILLED = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from agl_core import private
    from agl_online.ledger import Ledger
    from agl_online.ledger import By, Decision, State

    def killed(path, content):
        os.kill(os.getpid(), signal.SIGKILL)

    private.write = killed
    Ledger.of_run(Path(sys.argv[1])).record(Decision("default", 10, State.STABLE, By.CANARY, "It is better."))
""")


def test_a_kill_between_the_decision_and_its_mark_loses_nothing(ledger: Ledger) -> None:
    make_canary(ledger, 10)
    child = subprocess.run([sys.executable, "-c", KILLED, str(ledger.run)], timeout=60, check=False)
    assert child.returncode == -signal.SIGKILL

    assert ledger.current(DEFAULT).stable == 10
    assert Checkpoints(ledger.run / CHECKPOINTS, keep=1).stable() == {DEFAULT: 0}, "the mark is still the old one"
    ledger.settle()
    assert parse(f"{ledger.run}@stable").resolve().step == 10


WRITER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from agl_online.ledger import Ledger
    from agl_online.ledger import By, Decision, State
    from agl_online.ledger import LedgerError

    ledger, step = Ledger.of_run(Path(sys.argv[1])), int(sys.argv[2])
    for _ in range(50):
        for state, by in ((State.CANARY, By.CANARY), (State.ROLLED_BACK, By.CANARY)):
            try:
                ledger.record(Decision("default", step, state, by, "x" * 2000))
            except LedgerError:
                pass
""")


def test_two_writers_never_make_two_canaries(ledger: Ledger) -> None:
    for step in (10, 20):
        decide(ledger, step, State.CANDIDATE, By.TRAINING)
        decide(ledger, step, State.PASSED)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(ledger.run), str(step)]) for step in (10, 20)]
    assert [each.wait(60) for each in writers] == [0, 0]

    canary: int | None = None
    turns = set()
    for each in ledger.decisions()[5:]:
        if each.state is State.CANARY:
            assert canary is None
            canary = each.step
            turns.add(canary)
        else:
            assert canary == each.step
            canary = None
    assert turns == {10, 20}


def test_what_was_seen_of_a_canary_is_shown_until_it_is_decided(ledger: Ledger) -> None:
    make_canary(ledger, 10)
    assert ledger.live(DEFAULT) is None
    ledger.note(DEFAULT, 10, {"canary/reward": 0.4, "canary/sessions": 12.0})
    live = ledger.live(DEFAULT)
    assert live is not None
    assert live.figures == {"canary/reward": 0.4, "canary/sessions": 12.0}
    decide(ledger, 10, State.ROLLED_BACK, By.CANARY)
    assert ledger.live(DEFAULT) is None
