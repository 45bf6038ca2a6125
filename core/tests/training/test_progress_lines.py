"""What a run leaves on the screen, and when it evaluates."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from agl_core.config.models import EvalSection
from agl_core.training.evaluate import Evaluated
from agl_core.training.progress import Silent

from .scripted_training import make_bench


class Lines(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class ScriptedEvaluation:
    async def evaluate(self, step: int) -> Evaluated:
        entry = {"step": step, "set": "eval", "mode": "greedy", "reward": step / 4, "rollouts": 1, "seconds": 0.25}
        return Evaluated([entry], {}, 0, [], [])


async def lines_of_a_run(folder: Path, every: int) -> list[str]:
    trainer = make_bench(folder, steps=4).trainer
    loaded, session, observer = cast(Any, trainer.loaded), cast(Any, trainer.session), Lines()
    loaded.config = loaded.config.model_copy(update={"eval": EvalSection(every=every)})
    session.evaluator = ScriptedEvaluation()
    await replace(trainer, observer=observer).train()
    return observer.lines


async def test_each_step_and_each_evaluation_leaves_one_line(tmp_path: Path) -> None:
    lines = await lines_of_a_run(tmp_path, every=3)

    kinds = [re.split(r"/4  ", line)[1].split()[0] for line in lines]
    assert kinds == ["eval", "reward", "reward", "reward", "eval", "reward", "eval"]
    assert lines[0] == "step   0/4  eval greedy 0.000  0.2 s"
    assert re.fullmatch(
        r"step   1/4  reward \d\.\d{3}  \d+ \+ \d+ tokens  rollouts \d+\.\d s  update \d+\.\d s", lines[1]
    )


@pytest.mark.parametrize(("every", "evaluated"), [(0, []), (3, [0, 3, 4]), (4, [0, 4]), (9, [0, 4])])
async def test_evaluations_are_before_after_and_between_or_off(
    tmp_path: Path, every: int, evaluated: list[int]
) -> None:
    lines = await lines_of_a_run(tmp_path, every)

    assert [line for line in lines if "eval" in line] == [
        f"step {step:>3}/4  eval greedy {step / 4:.3f}  0.2 s" for step in evaluated
    ]
