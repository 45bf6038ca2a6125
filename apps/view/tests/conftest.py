"""A folder of runs as they were recorded, with text that tries to be more than text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import tomli_w
from starlette.testclient import TestClient
from testing_aids import write_store

from agl_core.store import Record
from agl_core.testing import episodes as make
from agl_core.types import (
    Attempt,
    Call,
    Ending,
    Mode,
    Recomputed,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Task,
    ToolResult,
    ToolStatus,
    TrainingRecord,
)
from agl_server.health.certificate import digest
from agl_view.serving import make_app

TOKEN = "the-token-of-the-test"
HERE = ("127.0.0.1", 50000)
"""A browser on this machine."""
HOSTILE = "<script>alert(1)</script>\" onmouseover='x' \x1b[31m\u202etxt.exe {{ 7 * 7 }} \ud800"
"""Tries to be markup, an attribute, a terminal's command, writing from right to left, a template, and UTF-8."""

PROMPT, IDS, LOGPROBS = np.array([1, 2, 3], np.int32), np.array([7, 8], np.int32), np.array([-0.01, -4.5], np.float32)
"""Every call has these."""
CONFIG: dict[str, Any] = {
    "config_version": 1,
    "name": "calc",
    "agent": {"entry": "my_agent:solve"},
    "tasks": {"train": {"source": "jsonl", "path": "tasks.jsonl"}},
    "policies": {"default": {"model": {"path": "weights"}}},
    "algorithm": {"name": "grpo"},
    "engine": {"name": "torch"},
    "train": {"steps": 4},
    "rewards": {"right": {"rule": "numeric_match", "weight": 2.0}},
}


class Parsed(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.text += " " if tag not in ("span", "mark") else ""

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def links(self) -> list[str]:
        return [str(attributes["href"]) for tag, attributes in self.tags if tag == "a"]


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", Parsed(page).text)


@dataclass(frozen=True)
class Folder:
    """Runs below `path`, and their pages."""

    path: Path
    browser: TestClient
    """Has shown the token."""

    def make(self, name: str = "calc", *records: Record, metrics: Any = ()) -> Path:
        """A run of these records, and these lines of metrics."""
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_text(tomli_w.dumps(CONFIG))
        (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in metrics))

        run = Run("calc", 0, 0.0, {"rewards": {"right": {"weight": 2.0}}})
        write_store(folder / "store.sqlite", run, *records)
        return folder

    def trained(self, name: str = "calc") -> Path:
        """A run of one step: two tasks, of which only the first has rollouts that differ."""
        records = [
            *rollout("s1-g0-m0", answer="42", reward=1.0, advantage=0.7),
            *rollout("s1-g0-m1", answer="41", reward=0.0, advantage=-0.7, tool=ToolStatus.ERROR),
            *rollout("s1-g1-m0", answer="1", reward=1.0, dropped="no_advantage"),
            *rollout("s1-g1-m1", answer="1", reward=1.0, dropped="no_advantage", agent="critic"),
        ]
        metrics = [
            {"step": 0, "kind": "eval", "restart": 0, "eval/greedy/reward/mean": 0.25},
            {"step": 1, "kind": "train", "restart": 0, "reward/mean": 1.5, "update/loss": -0.1}
            | {"groups/no_contrast": 0.5, "proved/exact": 3, "proved/different": 1}
            | {"dropped/no_advantage": 4, "seconds/rollouts": 3.0, "seconds/update": 1.0, "seconds/step": 4.5},
            {"step": 1, "kind": "eval", "restart": 0, "eval/greedy/reward/mean": 0.75},
        ]  # fmt: skip
        return self.make(name, *records, metrics=metrics)

    def page(self, address: str, status: int = 200) -> str:
        answer: httpx.Response = self.browser.get(address)
        assert answer.status_code == status, answer.text
        return answer.text


def rollout(
    id: str,
    *,
    answer: str,
    reward: float | None = None,
    advantage: float | None = None,
    dropped: str | None = None,
    tool: ToolStatus = ToolStatus.OK,
    agent: str = "solver",
    ending: Ending = Ending.FINISHED,
    question: str = "6 * 7",
) -> list[Record]:
    """A rollout of two calls with a tool between them."""
    step, group, member = id.split("-")
    call = {"id": f"{id}-t", "type": "function", "function": {"name": "look", "arguments": '{"at": "table"}'}}
    replies = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": f"It is {answer}"},
    ]
    messages = [
        {"role": "user", "content": question},
        replies[0],
        {"role": "tool", "content": "found", "tool_call_id": f"{id}-t"},
    ]
    task = Task(f"t-{group}", {"question": question}, metadata={"answer": "42"})
    planned = Rollout(id, "calc", 0, f"{step}-{group}", task, Mode.TRAIN, int(step[1:]), int(member[1:]))
    records: list[Record] = [
        planned if reward is None else replace(planned, state=RolloutState.DONE, counted_attempt=0, ending=ending),
        Attempt(id, 0, "w", 0.0, 1.0, ending, result=answer),
        *(_call(id, n, replies[n], messages[: 1 + 2 * n], agent) for n in (0, 1)),
        ToolResult(f"{id}-o", id, 0, "look", tool, f"{id}-t", {"at": "table"}, "found", started=1.0, ended=1.5),
    ]
    if reward is not None:
        records.append(Reward(id, 0, "right", reward, "right"))
        value = advantage if dropped is None else 0.0
        # Training computed the same probability of the first token alone.
        seen = digest(PROMPT, IDS, LOGPROBS)
        recomputed = Recomputed(3, seen, "float32", LOGPROBS + np.array([0.0, 0.01], np.float32))
        records += [
            TrainingRecord(id, 0, f"{id}-c{n}", 0, 1, 2 * reward, value, 0.125, dropped, recomputed=recomputed)
            for n in (0, 1)
        ]
    return records


def _call(id: str, sequence: int, reply: dict[str, Any], messages: list[Any], agent: str) -> Call:
    choice = make.choice(message=reply, response_ids=IDS, logprobs=LOGPROBS)
    return make.call(sequence, choice, rollout=id, request={"messages": messages}, agent=agent, prompt_ids=PROMPT)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Folder]:
    (tmp_path / "runs").mkdir()
    with TestClient(make_app([tmp_path / "runs"], TOKEN), "http://127.0.0.1:8000", client=HERE) as browser:
        assert browser.get(f"/?token={TOKEN}").status_code == 200
        yield Folder(tmp_path / "runs", browser)


@pytest.fixture
def calc(runs: Folder) -> Folder:
    """The folder with a trained run of this name."""
    runs.trained()
    return runs
