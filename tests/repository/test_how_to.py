"""The how-to pages: their files are what a run accepts, and their code does what it says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agl_core import kinds
from agl_core.config import check, load
from agl_core.learning import build_episode
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
FILES = {
    (page.stem, name): text
    for page in PAGES
    for name, text in re.findall(r'^```(?:python|toml) title="(.+?)"\n(.*?)^```$', page.read_text(), re.M | re.S)
}
CONFIGURATIONS = [key for key in FILES if key[1].endswith(".toml")]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """What the pages take for granted: an agent, tasks and a model."""
    (tmp_path / "my_agent.py").write_text("def solve(task_input):\n    return task_input\n")
    (tmp_path / "tasks.jsonl").write_text('{"id": "t", "input": "Oslo?", "answer": "4"}\n')
    (tmp_path / "tiny-model").symlink_to(ROOT / "examples" / "calc" / "policy")
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in {"my_agent", "my_rewards"} - modules:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("page", "name"), CONFIGURATIONS, ids=lambda each: each)
def test_a_run_with_the_pages_files_is_accepted(page: str, name: str, folder: Path) -> None:
    for (of, file), text in FILES.items():
        if of == page:
            (folder / file).write_text(text)

    check(load(folder / name))


def test_the_rewards_of_the_page_give_what_they_say(folder: Path) -> None:
    file = folder / "my_rewards.py"
    file.write_text(FILES["own-reward", "my_rewards.py"])
    plugins = Plugins.load([file])
    calls = [make.call(0), make.call(1)]
    sorry = replace(calls[0].choices[0], message={"role": "assistant", "content": "Sorry, I cannot."})
    calls[0] = replace(calls[0], choices=(sorry,))
    task = replace(make.rollout().task, metadata={"answer": "4"})
    episode = build_episode(make.rollout(task=task), make.attempt(result="It is 4."), calls, [])

    def score(name: str, **settings: int) -> object:
        component = plugins.component(kinds.REWARD, name, "the page")
        return component.build(component.options(**settings))(episode)

    assert score("right") == 1.0
    assert score("few_calls") == 1.0
    assert score("few_calls", most=1) == 0.0
    assert score("no_apology") == {episode.transitions[0].key: -0.1}
