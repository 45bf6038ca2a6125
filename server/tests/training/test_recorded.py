"""Training on recorded rollouts: what comes along, what is tokenised, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from memory_store import MemoryStore
from testing_aids import write_store

from agl_core.builtin import identical
from agl_core.config.models import RunConfig
from agl_core.errors import ConfigError, EpisodesError
from agl_core.kinds import Capability
from agl_core.learning.batch import BatchPlan, PolicyCredit, make_batches
from agl_core.protocols import ResponseScores
from agl_core.testing import episodes as make
from agl_core.types import (
    Batch,
    Call,
    Choice,
    CreditKind,
    DropReason,
    Ending,
    Mode,
    Reward,
    RolloutState,
    Run,
    Sampling,
)
from agl_server.builtin.tasks import RecordedOptions, RecordedRuns
from agl_server.training.evaluation import HeldOutReplies
from agl_server.training.recorded import RecordedGroups, Recordings
from agl_server.training.rollouts import Collector, TrainingPlan
from agl_server.training.session import check_agent

from .scripted_training import CountingEngine

USER = {"role": "user", "content": "2 + 3?"}
PROMPT = np.array([1, 2, 3], np.int32)
MINE = np.array([7, 8], np.int32)
LOGPROBS = np.array([-0.25, -0.5], np.float32)


class Tokenizing(CountingEngine):
    """An engine that tokenises: a token for each character."""

    def __init__(self, prompt: Sequence[int] = PROMPT) -> None:
        super().__init__()
        self._prompt = np.array(prompt, np.int32)

    async def tokenize(self, policy: str, calls: Sequence[Call]) -> list[Call]:
        def ids(choice: Choice) -> Any:
            text = str(choice.message["content"])
            return None if text == "unwritable" else np.array([*map(ord, text)], np.int32)

        return [
            replace(
                call,
                prompt_ids=None if ids(call.choices[0]) is None else self._prompt,
                choices=tuple(replace(choice, response_ids=ids(choice), logprobs=None) for choice in call.choices),
            )
            for call in calls
        ]


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "config_version": 1,
            "tasks": {"train": {"source": "recorded"}},
            "policies": {"default": {"model": {"path": "."}}},
            **sections,
        }
    )


def loaded_of(chosen: RunConfig) -> Any:
    """A configuration whose engine tokenises."""
    component = SimpleNamespace(component=SimpleNamespace(provides={Capability.RECORDED_TEXTS}))
    return SimpleNamespace(config=chosen, engine=component, imitates=False, trains_on_texts=False)


def record_run(
    folder: Path,
    *,
    mode: Mode = Mode.TRAIN,
    reply: str = "five",
    members: int = 2,
    split: str = "train",
    **choice: Any,
) -> None:
    """A run with one group: its calls have ids and log-probabilities, unless `choice` says otherwise."""
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text("config_version = 1\n[capture]\n")
    given = {"response_ids": MINE, "logprobs": LOGPROBS, **choice}
    records: list[Any] = [Run("old", 0, 0.0, {"rewards": {"right": {"weight": 0.5}}})]
    for member in range(members):
        name = f"{mode.value}-m{member}"
        state = {"state": RolloutState.DONE, "counted_attempt": 0, "ending": Ending.FINISHED}
        task = replace(make.rollout("r").task, split=split)
        records.append(
            make.rollout(name, run="old", group=f"{mode.value}-g", member=member, mode=mode, task=task, **state)
        )
        records.append(make.attempt(name, ending=Ending.FINISHED, result=reply))
        effective = Sampling(temperature=1.0 if mode.trains else 0.0)
        answered = replace(make.choice(message={"role": "assistant", "content": reply}), **given)
        ids = None if given["response_ids"] is None else PROMPT
        sampled = {"version": 3, "agent": "solver", "effective": effective, "prompt_ids": ids}
        records.append(make.call(0, answered, rollout=name, request={"messages": [USER]}, **sampled))
        records.append(Reward(name, 0, "right", float(member), "right"))
    write_store(folder / "store.sqlite", *records)


class Taken:
    """The first group that training takes of a recorded run."""

    def __init__(
        self, folder: Path, engine: Any = None, chosen: RunConfig | None = None, refill: int = 0, **options: Any
    ) -> None:
        source = RecordedRuns(RecordedOptions(run=folder, **options), Path(), 0)
        self.store, self.without_logprobs = MemoryStore(), source.without_logprobs
        loaded = loaded_of(chosen or config(train={"refill": refill}))
        hook: Any = type("Hook", (), {"episode_built": staticmethod(lambda episode: episode)})
        queue: Any = None
        collector = Collector(self.store, queue, (), dict.fromkeys(Ending, "score"), hook, lambda: None)
        plan = TrainingPlan(source, "new", 0, seed=0, groups_per_step=1, group_size=99)
        contrasts = iter((False, False, True))
        self.groups = RecordedGroups(
            loaded, source, engine or Tokenizing(), collector, plan, lambda group: next(contrasts)
        )
        self.drawn = asyncio.run(self.groups.draw(1, lambda share, note: None))
        self.episodes = self.drawn.episodes

    @property
    def batch(self) -> Batch:
        batch = self._step.batches["default"]
        assert isinstance(batch, Batch)
        return batch

    @property
    def dropped(self) -> list[str | None]:
        return [record.dropped for record in self._step.dropped]

    @property
    def _step(self) -> Any:
        credit = {"default": PolicyCredit("identical", identical, CreditKind.RETURN)}
        return make_batches([self.episodes], BatchPlan(credit, without_logprobs=self.without_logprobs))


def test_rollouts_of_training_come_along_with_ids_log_probabilities_and_rewards(tmp_path: Path) -> None:
    record_run(tmp_path / "old")

    taken = Taken(tmp_path / "old")

    assert taken.batch.tokens_T.tolist() == [*PROMPT, *MINE] * 2
    assert taken.batch.behaviour_logprobs_R.tolist() == [*LOGPROBS] * 2
    assert taken.batch.sampled_N.all()
    assert taken.batch.version_N.tolist() == [-1, -1], "no version of this run sampled them"
    assert [key.rollout for key in taken.batch.keys] == ["s1-g0-m0", "s1-g0-m1"]
    assert [episode.terminal for episode in taken.episodes] == [0.0, 0.5]
    assert [(r.run, r.mode, r.state) for r in asyncio.run(taken.store.rollouts())] == [
        ("new", Mode.TRAIN, RolloutState.DONE)
    ] * 2
    assert {reward.source for episode in taken.episodes for reward in episode.rewards} == {"recorded"}
    first = taken.episodes[0]
    assert (first.task.input, first.result, first.transitions[0].agent) == (
        make.rollout("r").task.input, "five", "solver"
    )  # fmt: skip
    assert first.transitions[0].messages == (USER,)


def test_the_rewards_that_the_agent_reported_of_its_calls_come_along(tmp_path: Path) -> None:
    record_run(tmp_path / "old")
    call = make.call(0, rollout="train-m0").id
    said = [Reward("train-m0", 0, "step", 0.25, "agent", call), Reward("train-m0", 0, "step", 2.0, "agent")]
    write_store(tmp_path / "old" / "store.sqlite", *said)

    first, second = Taken(tmp_path / "old").episodes

    assert [(e.terminal, e.transitions[0].reward) for e in (first, second)] == [(0.0, 0.25), (0.5, 0.0)]


def test_groups_with_nothing_to_compare_are_replaced_by_the_next_ones(tmp_path: Path) -> None:
    record_run(tmp_path / "old")

    taken = Taken(tmp_path / "old", refill=2)

    assert [group[0].group for group in taken.drawn.groups] == ["s1-g0", "s2-g0", "s3-g0"]
    assert [episode.dropped for episode in taken.episodes] == [DropReason.NO_CONTRAST] * 4 + [None] * 2
    assert (taken.groups.begun, taken.drawn.metrics) == (3, {"groups/replaced": 2.0})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"response_ids": None, "logprobs": None}, DropReason.NO_TOKEN_IDS),
        ({"logprobs": None}, DropReason.NO_LOGPROBS),
        ({"mode": Mode.EVAL_SAMPLED}, DropReason.NO_LOGPROBS),
        ({"mode": Mode.USE}, DropReason.NO_LOGPROBS),
    ],
)
def test_what_is_not_known_is_dropped_unless_the_user_says_so(
    tmp_path: Path, changes: dict[str, Any], reason: DropReason
) -> None:
    record_run(tmp_path / "old", **changes)

    assert Taken(tmp_path / "old").dropped == [reason] * 2
    batch = Taken(tmp_path / "old", without_logprobs=True).batch

    assert not batch.sampled_N.any()
    assert np.isnan(batch.behaviour_logprobs_R).all()
    assert batch.temperature_N.tolist() == [1, 1]
    has_ids = changes.get("response_ids", MINE) is not None
    assert batch.tokens_T.tolist() == [*PROMPT, *(MINE if has_ids else map(ord, "five"))] * 2


def test_a_reply_that_no_template_writes_is_dropped_and_counted(tmp_path: Path) -> None:
    record_run(tmp_path / "old", reply="unwritable", response_ids=None, logprobs=None)

    assert Taken(tmp_path / "old", without_logprobs=True).dropped == [DropReason.NO_TOKEN_IDS] * 2


def test_the_ids_of_another_model_are_refused_or_made_anew(tmp_path: Path) -> None:
    record_run(tmp_path / "old")
    another = Tokenizing(prompt=[9])

    with pytest.raises(ConfigError, match=r"another model was recorded.*without_logprobs = true"):
        Taken(tmp_path / "old", another)
    batch = Taken(tmp_path / "old", another, without_logprobs=True).batch

    assert batch.tokens_T.tolist() == [9, *map(ord, "five")] * 2
    assert not batch.sampled_N.any()


def test_a_run_that_trained_leaves_its_evaluations_out(tmp_path: Path) -> None:
    record_run(tmp_path / "old", mode=Mode.EVAL_GREEDY, split="eval", members=1)
    evaluations = RecordedRuns(RecordedOptions(run=tmp_path / "old"), Path(), 0)
    record_run(tmp_path / "old")

    source = RecordedRuns(RecordedOptions(run=Path("old")), tmp_path, 0)
    of_split = RecordedRuns(RecordedOptions(run=Path("old"), split="eval"), tmp_path, 0)

    assert (evaluations.size, evaluations.members(0)) == (1, 1)
    assert (source.size, source.members(0), source.task(0).split) == (1, 2, "train")
    assert (of_split.size, of_split.members(0), of_split.task(0).split) == (1, 1, "eval")


def test_calls_go_to_the_policy_of_their_agent(tmp_path: Path) -> None:
    record_run(tmp_path / "old")
    model = {"model": {"path": "."}}
    chosen = config(policies={"other": model, "mine": {**model, "agents": ["solv*"]}})

    taken = Taken(tmp_path / "old", chosen=chosen)

    assert {t.policy for episode in taken.episodes for t in episode.transitions} == {"mine"}
    with pytest.raises(ConfigError, match="no policy is chosen for the recorded calls of solver"):
        Taken(tmp_path / "old", chosen=config(policies={"other": model, "another": model}))


class Scoring(Tokenizing):
    """An engine that finds each token as unlikely as its id says, and the smallest ones most likely."""

    async def logprobs(self, policy: str, batch: Batch) -> ResponseScores:
        ends = zip(batch.offsets[1:], batch.response_lengths_N, strict=True)
        ids = np.concatenate([batch.tokens_T[end - length : end] for end, length in ends])
        return ResponseScores(np.where(ids == ord("e"), np.nan, -ids.astype(np.float64)), ids <= MINE[0])


async def measured(folder: Path, **train: Any) -> dict[str, float]:
    """The scores of a recorded held-out set."""
    source, engine = RecordedRuns(RecordedOptions(run=folder), Path(), 0), Scoring()
    loaded = loaded_of(config(train={"agents": ["*"], **train}))
    recordings = Recordings(source, loaded, engine, imitated=True)
    return await HeldOutReplies("eval", recordings, 2000).measure()


def test_of_held_out_replies_the_loss_and_the_accuracy_are_measured(tmp_path: Path) -> None:
    record_run(tmp_path / "ids")
    record_run(tmp_path / "texts", mode=Mode.EVAL_SAMPLED, response_ids=None, reply="\x01e\x09")

    assert asyncio.run(measured(tmp_path / "ids")) == {"loss": 7.5, "accuracy": 0.5, "tokens": 4.0}
    assert asyncio.run(measured(tmp_path / "texts")) == {"loss": 5.0, "accuracy": 0.5, "tokens": 4.0}, (
        "what it cannot say"
    )
    with pytest.raises(ConfigError, match=r"\[tasks.eval\]: none of the recorded calls can be scored"):
        asyncio.run(measured(tmp_path / "ids", agents=["nobody"]))


def test_what_is_imitated_has_no_log_probabilities_and_the_temperature_of_this_run(tmp_path: Path) -> None:
    record_run(tmp_path / "old", members=1)
    source = RecordedRuns(RecordedOptions(run=tmp_path / "old"), Path(), 0)
    engine = Tokenizing([9, 9])
    recordings = Recordings(source, loaded_of(config(sampling={"temperature": 0.5})), engine, imitated=True)

    [[recorded]] = asyncio.run(source.groups([0]))
    own = asyncio.run(recordings.adopt(recorded, make.rollout("mine")))

    [call] = own.calls
    assert (call.rollout, call.effective.temperature, call.choices[0].logprobs) == ("mine", 0.5, None)
    assert call.prompt_ids is not None
    assert call.prompt_ids.tolist() == [9, 9], "of another tokenizer, its texts are taken"


def test_several_runs_and_files_are_one_source(tmp_path: Path) -> None:
    record_run(tmp_path / "first")
    talk = [{**USER, "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]
    (tmp_path / "second.jsonl").write_text(json.dumps({"messages": talk, "reward": 0.5}))

    source = RecordedRuns(RecordedOptions(run=(tmp_path / "first", Path("second.jsonl"))), tmp_path, 0)

    assert [source.members(index) for index in range(source.size)] == [2, 1]
    [[last], [_, first], [again]] = asyncio.run(source.groups([1, 0, 1]))
    assert again.rollout == last.rollout
    assert (last.terminal, last.calls[0].choices[0].message["content"]) == (0.5, "four")
    assert first.rollout.member == 1
    (tmp_path / "second.jsonl").write_text("[]")
    with pytest.raises(EpisodesError, match=r"second.jsonl has no row"):
        RecordedRuns(RecordedOptions(run=Path("second.jsonl")), tmp_path, 0)


def test_what_cannot_be_trained_on_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is neither a run's folder .* nor a file"):
        RecordedRuns(RecordedOptions(run=Path("nowhere")), tmp_path, 0)
    record_run(tmp_path / "old", members=1)
    with pytest.raises(ConfigError, match="has no rollout of the split 'test' that is done"):
        RecordedRuns(RecordedOptions(run=tmp_path / "old", split="test"), tmp_path, 0)
    source = RecordedRuns(RecordedOptions(run=tmp_path / "old"), tmp_path, 0)
    with pytest.raises(ConfigError, match=r"no recorded task has two rollouts"):
        check_agent(config(), {"train": source}, compares=True)
    check_agent(config(), {"train": source}, compares=False)
    fresh: Any = type("Fresh", (), {"size": 1, "task": None})()
    with pytest.raises(ConfigError, match=r"names no agent, which \[tasks.eval\] needs"):
        check_agent(config(), {"train": source, "eval": fresh}, compares=False)
    with pytest.raises(ConfigError, match=r"names no agent, which \[tasks.train\] needs"):
        check_agent(config(), {"train": fresh}, compares=False)
