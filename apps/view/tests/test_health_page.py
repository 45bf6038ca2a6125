"""The page of a run's health, and what the other pages say of it."""

from __future__ import annotations

from .viewed_runs import HOSTILE, Folder, said

NUMBERS = {"kind": "train", "restart": 0, "reward/mean": 0.5, "health/healthy": 6.0, "health/unhealthy": 2.0}
ALARM = {"name": "truncated", "remedy": "Raise the limit.", "details": ""}


def test_alarms_verdicts_and_reasons(runs: Folder) -> None:
    runs.trained()
    runs.make(
        "calc",
        metrics=[
            {
                **NUMBERS,
                "step": 1,
                "unhealthy/truncated": 2.0,
                "alarms": [{**ALARM, "seen": f"0.4: {HOSTILE[:-1]}"}],
            },
            {**NUMBERS, "step": 2, "alarm/truncated": 1.0},
        ],
    )
    page = runs.page("/runs/calc/health")
    text = said(page)
    assert "truncated since step 1 0.4: <script>" in text
    assert "What to do Raise the limit." in text
    assert "<script>alert" not in page
    assert "2 6 2 0" in text
    assert "unhealthy: truncated 2" in text
    assert "/runs/calc/health" in runs.page("/runs/calc")


def test_a_run_without_steps_and_one_with_damaged_metrics(runs: Folder) -> None:
    folder = runs.make("calc")
    assert "No step has ended yet." in said(runs.page("/runs/calc/health"))
    (folder / "metrics.jsonl").write_bytes(
        b'{"step": 1, "kind": "train"}\n\xff{nonsense\n[1]\n{"step": 2, "kind": "train", "alarms": 7}\n{"step"'
    )
    text = said(runs.page("/runs/calc/health"))
    for line in (2, 3, 4):
        assert f"Line {line} of metrics.jsonl is no line of metrics" in text
    assert "Line 5" not in text, "it may be half written"
    assert "None was raised." in text
