"""Checks that hold for a run, whatever happened to its processes; and a storm, which kills them at random moments."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agl_core.testing.upstream import END_TOKEN, logprob
from agl_core.types import AttemptKey, Call, Ending, Mode, Rollout, RolloutState, Run, TransitionKey

from .fault_parts import LEDGER, checksum
from .fault_run import TRAINER, Recorded, TinyRun


def check_acknowledged(run: TinyRun) -> int:
    """Every reply that an agent got is in the store once, with every token; how many there were."""
    acknowledged = run.acknowledged()  # Before the store is read: what is in it by then must be there.
    calls = {call.id: call for call in _each_once(run.recorded().calls)} if acknowledged else {}
    for entry in acknowledged:
        call = calls.get(entry["call"])
        assert call is not None, f"acknowledged, and not in the store: {entry}"
        assert call.key == AttemptKey(entry["rollout"], entry["attempt"])
        assert not call.late, entry
        assert call.request["messages"] == entry["messages"]
        (choice,) = call.choices
        assert choice.message["content"] == entry["content"]
        assert call.prompt_ids is not None
        assert choice.response_ids is not None
        assert choice.logprobs is not None
        assert call.prompt_ids.tolist() == list(json.dumps(entry["messages"]).encode())
        assert choice.response_ids.tolist() == [*entry["content"].encode(), END_TOKEN]
        assert choice.logprobs.tolist() == [np.float32(logprob(token)) for token in choice.response_ids.tolist()]
    return len(acknowledged)


def check_ended(run: TinyRun, steps: int) -> None:
    """A run that has ended made so many steps, and trained on each sample that counts once."""
    recorded = run.recorded()
    staleness = run.settings.get("async", {}).get("max_staleness", 0)
    assert run.summary()["steps"] == steps
    assert not run.summary()["interrupted"]
    check_acknowledged(run)
    _check_lives(run, recorded)
    _check_metrics(run.folder / "metrics.jsonl", steps)
    effective = _effective(recorded, steps, may_wait=staleness > 0)
    _check_plan(effective, steps, run.settings["train"], in_order=staleness == 0)
    _check_samples(recorded, effective, run.folder / "checkpoints" / f"step-{steps:06d}" / LEDGER, staleness)


def _each_once(calls: Iterable[Call]) -> list[Call]:
    """The calls, after checking that none counts twice: no two agents ask the same, nor does one twice.

    Where a client asked the next server again, what the earlier one recorded does not count.
    """
    recorded = list(calls)
    for key in ("id", "conversation"):
        names = Counter(
            call.id if key == "id" else json.dumps(call.request["messages"])
            for call in recorded
            if key == "id" or not call.late
        )
        twice = [name for name, count in names.items() if count > 1]
        assert not twice, f"calls recorded twice, by {key}: {[c for c in recorded if c.id in twice] or twice}"
    return recorded


def _check_lives(run: TinyRun, recorded: Recorded) -> None:
    """Every rollout is done, by one of its attempts at most; no attempt was run twice."""
    attempts = {attempt.key: attempt for attempt in recorded.attempts}
    for rollout in recorded.rollouts:
        assert rollout.state is RolloutState.DONE, rollout
        if rollout.counted_attempt is not None:
            counted = attempts[AttemptKey(rollout.id, rollout.counted_attempt)]
            assert counted.ending is rollout.ending, (rollout, counted)
        else:
            assert rollout.ending in (Ending.LOST, Ending.CANCELLED), rollout
    begun = Counter((note["rollout"], note["attempt"]) for note in run.noted_as("begun"))
    assert [key for key, count in begun.items() if count > 1] == []
    assert begun.keys() <= attempts.keys()


def _check_metrics(path: Path, steps: int) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, steps + 1))


def _effective(recorded: Recorded, steps: int, *, may_wait: bool) -> dict[int, list[Rollout]]:
    """By step, the training rollouts of the restart whose step counts.

    Where groups may wait for a later step than they were planned for (`may_wait`), those that none has used do not
    count: the next restart begins them again.
    """
    of_group = {rollout.id: rollout.group for rollout in recorded.rollouts}
    used_at = {of_group[record.rollout]: record.step for record in recorded.training_records}
    rollouts_of: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in recorded.rollouts:
        step = used_at.get(rollout.group, 0 if may_wait else rollout.step)
        if rollout.mode is Mode.TRAIN and 1 <= step <= steps and _counts(rollout, step, recorded.runs):
            rollouts_of[step].append(rollout)
    return rollouts_of


def _counts(rollout: Rollout, step: int, runs: Iterable[Run]) -> bool:
    """False if a later restart went on from before this step of the rollout's."""
    later = [run for run in runs if run.restart > rollout.restart]
    return all(run.resumed_step is not None and step <= run.resumed_step for run in later)


def _check_plan(plan: Mapping[int, list[Rollout]], steps: int, settings: Mapping[str, Any], *, in_order: bool) -> None:
    """Each task of the plan had its group, once, and each group all its members, none of them lost."""
    assert sorted(plan) == list(range(1, steps + 1))
    tasks: Counter[int] = Counter()
    for step, rollouts in plan.items():
        by_group: dict[str, list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            by_group[rollout.group].append(rollout)
            assert rollout.ending not in (Ending.LOST, Ending.CANCELLED, None), rollout
        assert len(by_group) == settings["groups_per_step"], (step, sorted(by_group))
        for members in by_group.values():
            assert sorted(member.member for member in members) == list(range(settings["group_size"])), members
            tasks[int(members[0].task.id)] += 1
    assert set(tasks.values()) == {1}, tasks
    assert not in_order or sorted(tasks) == list(range(len(tasks)))


def _check_samples(recorded: Recorded, by_step: Mapping[int, list[Rollout]], ledger: Path, staleness: int) -> None:
    """Each call that counts was used at the step of its rollout, once; the engine was trained on just those."""
    calls: dict[AttemptKey, list[Call]] = defaultdict(list)
    for call in _each_once(recorded.calls):
        calls[call.key].append(call)
    training_records: dict[TransitionKey, list[Any]] = defaultdict(list)
    for record in recorded.training_records:
        training_records[record.key].append(record)
    used: set[TransitionKey] = set()
    trained: list[list[Any]] = []
    for step in sorted(by_step):
        batch, version = [], sum(map(bool, trained))  # A step of which all data are too old makes no version.
        for rollout in by_step[step]:
            assert rollout.counted_attempt is not None
            for call in calls[AttemptKey(rollout.id, rollout.counted_attempt)]:
                if call.late:
                    continue
                key = TransitionKey(*call.key, call.id, 0)
                assert [record.step for record in training_records[key]] == [step], (key, training_records[key])
                used.add(key)
                if training_records[key][0].dropped is None:
                    assert call.version is not None
                    assert version - staleness <= call.version <= version, (step, version, call.version)
                    batch.append([*key, _checksum(call)])
        trained.append(sorted(batch))
    effective = {rollout.id for rollouts in by_step.values() for rollout in rollouts}
    strays = [key for key in training_records if key.rollout in effective and key not in used]
    assert strays == [], f"used in training, and not of an attempt that counts: {strays}"
    saved = json.loads(ledger.read_text())
    assert [sorted(update) for update in saved["updates"]] == [batch for batch in trained if batch]
    assert any(trained)


def _checksum(call: Call) -> int:
    (choice,) = call.choices
    assert call.prompt_ids is not None
    assert choice.response_ids is not None
    assert choice.logprobs is not None
    return checksum(call.prompt_ids, choice.response_ids, choice.logprobs)


AGENT, WORKER = "agent", "worker"

_LAST_STEPS = 2
_STARTING = 4.0
"""Seconds: a part that was started again is still starting for some of them."""
_MOST_REPLIES = 15
_LONGEST_PAUSE = 0.5


def drawn_settings(chance: random.Random) -> dict[str, Any]:
    """Settings in which storms differ: how often a checkpoint is written, evaluations, and asynchronous training."""
    settings: dict[str, Any] = {
        "train.checkpoint_every": chance.choice([1, 1, 2, 3]),
        "async.max_staleness": chance.choice([0, 0, 2]),
    }
    return {**settings, "tasks.eval": {"source": "counting"}} if chance.random() < 0.5 else settings


def storm(run: TinyRun, chance: random.Random, kills: int) -> Iterator[str]:
    """Start a run without end, kill something `kills` times, then have the run end; yields what was killed.

    What was acknowledged is looked for after every kill, and everything else at the end.
    """
    run.start()
    wait_for_replies(run, 1)
    for victim in _victims([TRAINER, WORKER, AGENT], chance, kills):
        _kill(run, chance, victim)
        if run.acknowledged():
            check_acknowledged(run)
        yield victim
    wait_for_replies(run, 1)
    check_ended(run, run.finish_after(_LAST_STEPS))


def wait_for_replies(run: TinyRun, more: int) -> None:
    enough = len(run.acknowledged()) + more
    run.until(lambda: len(run.acknowledged()) >= enough, f"agents got {more} more replies")


def _victims(kinds: Sequence[str], chance: random.Random, kills: int) -> list[str]:
    """Each kind about as often as any other, in random order."""
    victims = [kinds[number % len(kinds)] for number in range(kills)]
    chance.shuffle(victims)
    return victims


def _kill(run: TinyRun, chance: random.Random, victim: str) -> None:
    """Kill one at a random moment: while agents get replies, or while something may still be starting."""
    if chance.random() < 0.3:
        time.sleep(chance.uniform(0, _STARTING))
    else:
        wait_for_replies(run, chance.randint(1, _MOST_REPLIES))
        time.sleep(chance.uniform(0, _LONGEST_PAUSE))
    if victim == AGENT:
        run.until(run.running_agents, "an agent was running")
        for agent in run.running_agents()[:1]:
            with contextlib.suppress(ProcessLookupError):  # It has ended just now.
                os.kill(agent, signal.SIGKILL)
        return
    name = chance.choice([name for name in run.parts if name != TRAINER]) if victim == WORKER else victim
    run.parts[name].kill()
    run.begin(name)
