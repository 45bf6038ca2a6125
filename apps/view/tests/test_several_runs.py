"""Pages about several runs: over HTTP, as a browser asks."""

from __future__ import annotations

from dataclasses import replace

from agl_core.types import Mode, Rollout, Task, TrainingRecord

from .viewed_runs import Folder, Parsed, rollout, said


def test_two_runs_are_compared_by_their_rewards_and_settings(runs: Folder) -> None:
    runs.trained()
    config = runs.trained("other") / "config.toml"
    config.write_text(config.read_text().replace('name = "grpo"', 'name = "ppo"'))
    chosen = {found.get("value") for tag, found in Parsed(runs.page("/")).tags if found.get("name") == "run"}
    assert chosen == {"calc", "other"}

    page = runs.page("/compare?run=calc&run=other")

    charts = [found["aria-label"] for tag, found in Parsed(page).tags if tag == "svg"]
    assert charts == [
        "Reward. calc, training from 1.5 to 1.5; calc, eval, greedy from 0.25 to 0.75; "
        "other, training from 1.5 to 1.5; other, eval, greedy from 0.25 to 0.75"
    ]
    assert "Settings that differ 1 setting calc other algorithm.name grpo ppo" in said(page)
    assert "Choose one or two runs" in runs.page("/compare", 400)
    assert "There is no run" in runs.page("/compare?run=nope", 404)


def test_two_evaluations_are_compared_task_by_task(runs: Folder) -> None:
    rewards = {0: (0.0, 1.0, 1.0), 2: (1.0, 0.0, 1.0)}
    records = [
        replace(record, mode=Mode.EVAL_GREEDY, step=step, task=Task(f"t{at}", {"question": f"number {at}"}))
        if isinstance(record, Rollout)
        else record
        for step, given in rewards.items()
        for at, reward in enumerate(given)
        for record in rollout(f"s{step}-g{at}-m0", answer="1", reward=reward)
        if not isinstance(record, TrainingRecord)
    ]
    metrics = [{"step": at, "kind": "eval", "restart": 0, "eval/greedy/reward/mean": 0.5} for at in rewards]
    runs.make("calc", *records, metrics=metrics)

    page = said(runs.page("/compare?run=calc"))

    assert "Solved now, or better 1 a higher reward than before task before after number 0 0 2 side by side" in page
    assert "Lost, or worse 1 a lower reward than before task before after number 1 2 0 side by side" in page
    assert "The same 1" in page
    assert "mean over the 3 tasks of both1.333 → 1.333" in page
    assert page == said(runs.page("/compare?a=calc@0&b=calc@2&mode=eval-greedy"))
    assert "no task in common" in runs.page("/compare?a=calc@0&b=calc@1")
    assert "a=x" in runs.page("/compare?a=calc@x&b=calc@1", 400)


def test_no_code_of_a_run_runs(runs: Folder) -> None:
    folder = runs.trained()
    (folder / "plugin.py").write_text("from pathlib import Path\nPath(__file__).with_name('it-ran').touch()\n")
    config = folder / "config.toml"
    config.write_text(f'plugins = ["{folder}/plugin.py"]\n{config.read_text()}')

    for page in ("", "/rollouts", "/rollouts/s1-g0-m0", "/groups/s1-g0-m0", "/health"):
        runs.page(f"/runs/calc{page}")

    assert not (folder / "it-ran").exists()


def test_one_task_of_two_runs_is_side_by_side(runs: Folder) -> None:
    runs.trained("calc@home")
    runs.trained()
    address = "/compare/task?a=calc%40home%40s1-g0-m1&b=calc%40s1-g0-m0"

    page = said(runs.page(address))

    assert "One task, before and after" in page
    assert "calc@home, step 1 0 calc, step 1 2 turn 0" in page
    assert "It is 41" in page
    assert "It is 42" in page
    assert "different tasks" not in page
    runs.make("sum", *rollout("s1-g0-m0", answer="2", question="1 + 1"))
    assert "different tasks" in runs.page("/compare/task?a=calc@s1-g0-m1&b=sum@s1-g0-m0")
    assert "b in the address must be RUN@ROLLOUT" in runs.page("/compare/task?a=calc@s1-g0-m1", 400)
    assert "nope" in runs.page("/compare/task?a=calc@s1-g0-m1&b=calc@nope", 404)
    assert "There is no run" in runs.page("/compare/task?a=nope@s1-g0-m1&b=calc@x", 404)
