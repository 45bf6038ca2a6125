"""Teachers: what a loaded one and a served one say of a policy's tokens, and what is wrong with either."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from agl_algorithms.distill import Distill
from agl_algorithms.plugin import DistillOptions
from agl_algorithms.policy_gradient import Teacher
from agl_core.errors import EngineError
from agl_core.protocols import PolicySpec
from agl_core.testing.engines import Row, batch_of
from agl_core.testing.scripts import Fail, Raw, Received, Step
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import DropReason
from agl_torch.loading import Bases, LoadedModel
from agl_torch.teachers import ServedTeacher, load_teacher

from .conftest import (
    Shape,
    all_logprobs,
    load,
    make_batch,
    make_checkpoint,
    saved,
    start_policies,
    trainer_of,
    update,
    weights_of,
)


@pytest.fixture(scope="module")
def moved(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint after some training."""
    policy = PolicySpec(str(checkpoint), optimizer={"learning_rate": 0.01})
    return saved(tmp_path_factory.mktemp("teacher"), policy, updates=3)[1]


class Server(ScriptedUpstream):
    """vLLM's completions of prompts of ids, computed by a model here."""

    def __init__(self, loaded: LoadedModel, shift: int = 0) -> None:
        super().__init__()
        self.answer = self.reply
        self.loaded, self.shift = loaded, shift
        """`shift`: by how much the ids of its tokens are off."""
        self.status = 200
        self.with_logprobs = True
        self.surest: float | None = None
        """The log-probability of every token, if set."""

    def reply(self, received: Received) -> Step:
        if self.status != 200:
            return Fail(self.status, {"error": {"message": "no such model"}})
        choices = []
        for index, prompt in enumerate(received.body["prompt"]):
            ids = torch.tensor(prompt)
            with torch.no_grad():
                logprobs = torch.log_softmax(self.loaded.model(input_ids=ids[None]).logits[0].float(), -1)
            known = [
                {str(id): {"logprob": value, "decoded_token": self.loaded.tokenizer.decode([id + self.shift])}}
                for id, row in zip(prompt[1:], logprobs, strict=False)
                for value in [float(row[id]) if self.surest is None else self.surest]
            ]
            choices.append({"index": index, **({"prompt_logprobs": [None, *known]} if self.with_logprobs else {})})
        return Raw(json.dumps({"choices": choices[::-1]}).encode())


def test_a_loaded_teacher_scores_at_the_temperature_of_each_transition(loaded: LoadedModel, moved: Path) -> None:
    batch = make_batch(loaded)
    teacher = load_teacher(Teacher(str(moved)), PolicySpec("unused", lora={"rank": 4}), loaded, Bases())
    expected = all_logprobs(load(moved).model, batch) - all_logprobs(loaded.model, batch)
    before = weights_of(teacher.model)
    trainer = trainer_of(loaded)
    algorithm = Distill(DistillOptions(teacher=str(moved)))
    result = trainer.update(batch, algorithm, None, teacher)
    ends = batch.response_offsets
    means = [expected[a:b][batch.mask_R[a:b]].mean() for a, b in pairwise(ends)]
    np.testing.assert_allclose(result.advantage_N, means, atol=1e-5)
    assert result.weight_N.sum() == pytest.approx(1, abs=1e-6)
    later = [trainer.update(batch, algorithm, None, teacher).metrics["kl_teacher"] for _ in range(8)]
    assert later[-1] < 0.7 * result.metrics["kl_teacher"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.model.state_dict().items())


def test_the_engine_loads_the_teacher_of_a_policy_before_the_first_update(checkpoint: Path, moved: Path) -> None:
    policy = PolicySpec(str(checkpoint), algorithm="distill")
    policies = start_policies(default=replace(policy, algorithm_options={"teacher": str(moved), "reward_weight": 0.5}))
    assert update(policies).metrics["kl_teacher"] > 0
    with pytest.raises(EngineError, match=r"'\./no/such' cannot be loaded"):
        start_policies(default=replace(policy, algorithm_options={"teacher": "./no/such"}))


def test_a_teacher_with_other_tokens_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "llama", Shape("llama"))
    with pytest.raises(EngineError, match="another tokenizer than the policy: the token"):
        load_teacher(Teacher(str(other)), PolicySpec("unused"), loaded, Bases())
    with Server(loaded, shift=1) as server, pytest.raises(EngineError, match=r"another tokenizer.*: id"):
        ServedTeacher(Teacher(server.url, "teacher"), loaded.tokenizer)


def test_a_served_teacher_says_what_the_same_weights_say_here(
    loaded: LoadedModel, moved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_TEACHER", "secret")
    batch = make_batch(loaded, groups=4, members=8)
    batch = replace(batch, temperature_N=np.ones_like(batch.temperature_N))
    chosen = np.arange(1, len(batch))
    with Server(load(moved)) as server:
        teacher = ServedTeacher(Teacher(server.url, "big", "OF_TEACHER"), loaded.tokenizer)
        logprobs = teacher.logprobs(batch, chosen)
        expected = all_logprobs(server.loaded.model, batch)
        expected[: batch.response_offsets[1]] = 0
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
        assert {received.headers["authorization"] for received in server.received} == {"Bearer secret"}
        assert {received.body["model"] for received in server.received} == {"big"}
        assert len(server.received) < len(batch) / 2

        # The grammar of a reply is not known there, and of calls that continue each other the last one has all.
        turns = batch_of([Row([5, 6], [7, 8], [-1.0, -1.0], 0.0), Row([5, 6, 7, 8, 9], [10], [-1.0], 0.0)])
        turns = replace(turns, rollout_N=np.zeros(2, np.int64), turn_N=np.arange(2))
        before = len(server.received)
        np.testing.assert_allclose(
            teacher.logprobs(turns, np.arange(2)), all_logprobs(server.loaded.model, turns), atol=1e-4
        )
        assert [received.body["prompt"] for received in server.received[before:]] == [[[5, 6, 7, 8, 9, 10]]]
        formed = replace(turns, grammar_N=np.array([None, "{}"], object))
        result = trainer_of(loaded).update(formed, Distill(DistillOptions(teacher="a/b")), None, teacher)
        assert result.dropped == (None, DropReason.CONSTRAINED)


def test_what_is_wrong_with_a_served_teacher_is_said_with_the_remedy(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OF_TEACHER", raising=False)
    with Server(loaded) as server:
        known = Teacher(server.url, "teacher")
        with pytest.raises(EngineError, match="teacher_key_env = 'OF_TEACHER'"):
            ServedTeacher(replace(known, key_env="OF_TEACHER"), loaded.tokenizer)
        with pytest.raises(EngineError, match="temperature = 1"):
            ServedTeacher(known, loaded.tokenizer).logprobs(make_batch(loaded), np.arange(3))
        batch = make_batch(loaded)
        batch = replace(batch, temperature_N=np.ones_like(batch.temperature_N))
        for server.surest in (math.inf, 1e308, math.nan, 0.1):
            with pytest.raises(EngineError, match=f"gives {re.escape(f'{server.surest:g}')} as the log-probability"):
                ServedTeacher(known, loaded.tokenizer).logprobs(batch, np.arange(3))
        server.with_logprobs = False
        with pytest.raises(EngineError, match="gives no log-probabilities of a prompt's tokens"):
            ServedTeacher(known, loaded.tokenizer)
        server.status = 404
        with pytest.raises(EngineError, match=r"refuses \(status 404\): no such model"):
            ServedTeacher(known, loaded.tokenizer)
    with pytest.raises(EngineError, match=r"does not answer.*Start its server"):
        ServedTeacher(known, loaded.tokenizer)
