"""Credit in `agl doctor RUN`: from recorded rollouts, which it counts, to the rule that follows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from agl_core.store import Record
from agl_core.types import Attempt, Ending, Mode, Reward, RolloutState, Run, ToolResult, ToolStatus

from .conftest import RecordedRun, call

OK, ERROR, EMPTY = ToolStatus.OK, ToolStatus.ERROR, ToolStatus.EMPTY


@dataclass(frozen=True)
class Played:
    """A rollout: its reward, the status of the tool `look` in each call, and what the calls meet."""

    reward: float | None
    statuses: Sequence[ToolStatus | None] = ()
    prompts: Sequence[int] | None = None
    """By call; without them all prompts differ."""
    rooms: Sequence[str] = ()

    def records(self, run: RecordedRun, step: int, member: str, **changes: Any) -> Iterable[Record]:
        done: dict[str, Any] = {"state": RolloutState.DONE, "counted_attempt": 0, "ending": Ending.FINISHED}
        rollout = run.planned(step, member, **done | changes)
        yield from (rollout, Attempt(rollout.id, 0, "w", 0.0, 1.0, Ending.FINISHED))
        if self.reward is not None:
            yield Reward(rollout.id, 0, "right", self.reward, "right")
        for n, status in enumerate(self.statuses):
            function = {"name": "look", "arguments": "{}"}
            asks = [{"id": f"{rollout.id}-t{n}", "type": "function", "function": function}]
            prompt = [self.prompts[n]] if self.prompts else [step, int(member[1:]), n]
            state = {"room": self.rooms[n]} if self.rooms else None
            message = {"role": "assistant", "content": None, **({"tool_calls": asks} if status else {})}
            yield replace(call(rollout.id, n, message, prompt), state=state)
            if status:
                yield ToolResult(f"{rollout.id}-o{n}", rollout.id, 0, "look", status, f"{rollout.id}-t{n}")


def record(run: RecordedRun, *groups: Sequence[Played], restart: int = 1, **changes: Any) -> None:
    """A step of one group after the other, from step 2 on."""
    (run.store.parent / "metrics.jsonl").write_text('{"step": 2, "kind": "train"}\n')
    run.put(
        *(
            record
            for step, group in enumerate(groups, 2)
            for member, played in enumerate(group)
            for record in played.records(run, step, f"m{member}", restart=restart, **changes)
        )
    )


def said(run: RecordedRun) -> dict[str, str]:
    result = run.agl("doctor", "runs/calc", "--json")
    return {finding["subject"]: finding["text"] for finding in json.loads(result.output)}


@pytest.fixture
def empty(run: RecordedRun) -> RecordedRun:
    """A run whose own three rollouts are gone: a later restart began anew."""
    run.put(Run("calc", 1, 0.0, {"rewards": {"right": {"weight": 1.0}}}, resumed_step=0))
    return run


WON = Played(1.0, [OK, OK, None])
LOST = Played(0.0, [OK, ERROR, EMPTY, OK])


def test_it_counts_successes_contrast_and_tools(run: RecordedRun) -> None:
    """Beside the recorded run's group, of three rollouts with a tool call each."""
    record(run, [WON, LOST], [LOST, LOST], [WON, Played(None, [ERROR])], restart=0)
    text = run.agl("doctor", "runs/calc").output

    assert "ok    credit: 3 of 7 rollouts succeed, and 67% of their groups differ; " in text, "a lone one is no group"
    assert "; calls of look that work: 75% in successful rollouts, 46% in others" in text
    assert "ok    advice: credit 'identical', until 10 successes tell whether tools that work go with them" in text


@pytest.mark.parametrize(
    ("winners", "lost", "advice"),
    [
        (10, [OK, ERROR, ERROR, OK], "credit 'air': where rollouts succeed, more calls work of look"),
        (10, [OK, OK, OK, ERROR], "credit 'air'"),  # 0.25 is enough.
        (10, [OK, OK, OK, OK, ERROR], "credit 'identical': nothing"),
        (10, [OK, EMPTY], "credit 'air'"),  # AIR counts an empty result as a failure.
        (9, [ERROR], "credit 'identical', until 10 successes"),
        (0, [ERROR], "credit 'identical', until 10 successes"),
        (10, [], "credit 'identical': nothing"),
    ],
)
def test_air_follows_from_a_difference_over_ten_successes(
    empty: RecordedRun, winners: int, lost: list[ToolStatus], advice: str
) -> None:
    loser = Played(0.0, lost)
    record(empty, *([WON, loser] if n < winners else [loser, loser] for n in range(12)))
    assert said(empty)["advice"].startswith(advice)
    assert f"{winners} of 24 rollouts succeed" in said(empty)["credit"]


def test_a_few_calls_of_a_tool_speak_for_nothing(empty: RecordedRun) -> None:
    record(empty, [WON, Played(0.0, [ERROR] * 20)], *[[Played(1.0), Played(0.0)]] * 9)
    assert "calls of look that work: 100% in successful rollouts, 0% in others" in said(empty)["credit"]
    assert said(empty)["advice"] == "credit 'identical': nothing that was recorded speaks for another rule"


MEET = "% of the calls after the first meet a prompt again, "


@pytest.mark.parametrize(
    ("prompts", "rooms", "seen"),
    [
        ([[1, 2, 3], [1, 3, 2]], "", f"100{MEET}0% a named state"),
        ([[1, 2, 3], [1, 2, 4]], "", f"50{MEET}0%"),
        ([[1, 2, 3, 3, 3], [1, 2, 4]], "", f"33{MEET}0%"),  # It met itself again.
        (None, ["hall", "loft"], f"0{MEET}0%"),  # The first call tells nothing.
        (None, ["hall den", "loft den"], f"0{MEET}100%"),
    ],
)
def test_prompts_and_states_that_others_of_the_group_meet_are_counted(
    empty: RecordedRun, prompts: Any, rooms: Any, seen: str
) -> None:
    met = prompts or [walked.split() for walked in rooms]
    fields = "prompts" if prompts else "rooms"
    record(empty, [Played(float(n), [None] * len(of_one), **{fields: of_one}) for n, of_one in enumerate(met)])
    assert seen in said(empty)["credit"]
    assert said(empty)["advice"] == "credit 'identical': nothing that was recorded speaks for another rule"


@pytest.mark.parametrize(
    ("reward", "successes", "works"), [(0.0, 0, "none in successful rollouts, 100%"), (1.0, 2, "100% in successful")]
)
def test_rewards_that_are_all_equal(empty: RecordedRun, reward: float, successes: int, works: str) -> None:
    record(empty, [Played(reward, [OK, OK], [1, 2])] * 2)
    seen = said(empty)["credit"]
    assert seen.startswith(f"{successes} of 2 rollouts succeed, and 0% of their groups differ; ")
    assert f"100{MEET}" in seen
    assert f"calls of look that work: {works}" in seen


def test_rollouts_without_a_reward_or_a_group_or_for_training_say_nothing(empty: RecordedRun) -> None:
    record(empty, [Played(None, [OK, OK])] * 2, [WON])
    record(empty, *[[]] * 4, [WON, LOST], mode=Mode.EVAL_SAMPLED)
    record(empty, *[[]] * 6, [WON, LOST], state=RolloutState.RUNNING)
    assert not said(empty).keys() & {"credit", "advice"}
    assert {"run", "alarms"} <= said(empty).keys()


def test_a_long_run_is_read_from_its_end(empty: RecordedRun) -> None:
    record(empty, *[[Played(1.0)] * 100] * 2, *[[LOST] * 100] * 4)
    assert said(empty)["credit"].startswith("0 of 400 rollouts succeed")


def test_imported_conversations_speak_for_a_rule_too(run: RecordedRun) -> None:
    asks = {"role": "assistant", "tool_calls": [{"id": "t", "type": "function", "function": {"name": "look"}}]}
    rows = [
        {"id": f"task{n % 5}", "reward": reward, "messages": [
            {"role": "user", "content": "go"}, asks,
            {"role": "tool", "tool_call_id": "t", "content": result}, {"role": "assistant", "content": "done"}]}
        for n in range(10) for reward, result in ((1.0, "a page"), (0.0, "Error: no page"))
    ]  # fmt: skip
    (run.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run.agl("import", "rows.jsonl").exit_code == 0
    text = run.agl("doctor", "runs/imported").output
    assert "credit: 10 of 20 rollouts succeed, and 100% of their groups differ; " in text
    assert "; calls of look that work: 100% in successful rollouts, 0% in others" in text
    assert "advice: credit 'air'" in text
