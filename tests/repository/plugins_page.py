"""The examples of docs/plugins.md, and what each has to do, however it was added.

Run as a program it tries what is installed: it is how the tests try the page's package.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

from agl_core import kinds
from agl_core.capture import AttemptContext, Identity, Recording, current_identity, running
from agl_core.kinds import Kind
from agl_core.plugins import Plugins
from agl_core.types import (
    Attempt,
    DropReason,
    Ending,
    Episode,
    FinishReason,
    Mode,
    Reward,
    Rollout,
    Task,
    Transition,
    TransitionKey,
)

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"

MADE = {
    kinds.REWARD: {"brevity", "well_formed", "calculated", "shortest"},
    kinds.CREDIT: {"relative"},
    kinds.ALGORITHM: {"rloo"},
    kinds.TASK_SOURCE: {"sums"},
    kinds.TRACKER: {"reward_curve"},
    kinds.BUFFER: {"unequal"},
    kinds.STORE: {"fast_disk"},
    kinds.ENGINE: {"endpoint"},
    kinds.ADAPTER: {"tiny"},
    kinds.SECTION: {"opening"},
}
"""What the page's files bring."""


def examples() -> dict[str, str]:
    """The page's plugin files by name."""
    return {name: code for name, code in _files().items() if not name.startswith("test_")}


def example_of_a_test() -> str:
    """The page's test of a plugin."""
    (code,) = (code for name, code in _files().items() if name.startswith("test_"))
    return code


def _files() -> dict[str, str]:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return {block.split("\n", 1)[0].removeprefix("# "): block for block in blocks}


def configurations() -> list[str]:
    """The page's TOML."""
    return re.findall(r"^\s*```toml\n(.*?)^\s*```$", PAGE.read_text(), re.M | re.S)


def exercise(plugins: Plugins) -> None:
    """Try each of the page's components; AssertionError for one that does not do what the page says."""

    def made(kind: Kind, name: str, *context: Any, **settings: Any) -> Any:
        component = plugins.component(kind, name, "the page")
        assert component.doc, f"{kind} {name} has no description"
        return component.build(component.options(**settings), *context)

    for kind, names in MADE.items():
        assert names <= plugins.components(kind).keys(), kind
    short, long = _episode(0, "4", terminal=1.0), _episode(1, "It is four.")
    assert made(kinds.REWARD, "brevity", limit=5)(short) == 1.0
    assert made(kinds.REWARD, "brevity", limit=5)(long) == 0.0
    assert made(kinds.REWARD, "well_formed")(short) == {short.transitions[1].key: -0.1}
    calculated = replace(short, result="2 + 2", task=replace(short.task, metadata={"value": 4}))
    assert asyncio.run(made(kinds.REWARD, "calculated")(calculated)) == 1.0
    assert made(kinds.REWARD, "shortest").reward([short, long]) == [1.0, 0.0]
    assert made(kinds.REWARD, "shortest").reward([short]) == [None]
    assert made(kinds.CREDIT, "relative", gamma=0.5)([short, long]) == [[0.0, 0.5], [-0.5, -0.5]]
    _try_algorithm(made(kinds.ALGORITHM, "rloo"))
    sums = made(kinds.TASK_SOURCE, "sums", Path(), 0, count=3)
    assert (sums.size, sums.task(2).input, sums.task(2).metadata) == (3, "2 + 2 = ?", {"result": "4"})
    unequal = made(kinds.BUFFER, "unequal")
    unequal.add([short, replace(short, member=1)])
    assert len(unequal) == 0
    unequal.add([short, long])
    assert len(unequal) == 1
    asyncio.run(
        _try_engine(made(kinds.ENGINE, "endpoint", SimpleNamespace(policies={"a": SimpleNamespace(model="m")})))
    )
    assert made(kinds.SECTION, "opening", hour=8).hour == 8
    with TemporaryDirectory() as name:
        folder = Path(name)
        curve = made(kinds.TRACKER, "reward_curve", folder, path=folder / "rewards.csv")
        curve.log(1, {"reward/mean": 0.5})
        curve.log(2, {"loss": 0.5})
        assert (folder / "rewards.csv").read_text() == "1,0.5\n"
        asyncio.run(_try_store(made(kinds.STORE, "fast_disk", Path("my-run"), folder=folder)))
        assert (folder / "my-run.sqlite").exists()
    _try_adapter(made(kinds.ADAPTER, "tiny"))
    _try_run_hooks(plugins, short)


def _episode(member: int, result: str, terminal: float = 0.0) -> Episode:
    """Of two calls; the tool calls of the second cannot be parsed."""
    calls = tuple(
        Transition(
            key=TransitionKey(f"r{member}", 0, f"c{turn}", 0),
            agent="solver",
            turn=turn,
            agent_turn=turn,
            policy="default",
            version=0,
            messages=(),
            response={},
            finish_reason=FinishReason.STOP,
            temperature=1.0,
            parse_error="no JSON" if turn else None,
        )
        for turn in range(2)
    )
    task = Task("t", "2 + 2 = ?")
    return Episode(f"r{member}", 0, "g", member, task, Mode.TRAIN, Ending.FINISHED, calls, result, terminal=terminal)


def _try_algorithm(algorithm: Any) -> None:
    import torch

    from agl_algorithms.policy_gradient import Samples

    each, zeros = torch.tensor([0, 1]), torch.zeros(2, dtype=torch.int64)
    samples = Samples(
        transition_R=each,
        mask_R=torch.tensor([True, True]),
        behaviour_R=torch.zeros(2),
        values_N=torch.tensor([1.0, 0.0]),
        scores_N=torch.tensor([1.0, 0.0]),
        group_N=zeros,
        rollout_N=each,
        turn_N=zeros,
    )
    assert algorithm.advantages(samples).tolist() == [1.0, -1.0]


async def _try_engine(engine: Any) -> None:
    upstream = await engine.start()
    models: Mapping[str, str] = upstream.models
    assert models == {"a": "m"}
    assert await engine.versions() == {"a": 0}
    await engine.stop()


async def _try_store(store: Any) -> None:
    async with store:
        await store.put(Reward("r", 0, "right", 1.0, "right"))


def _try_adapter(adapter: Any) -> None:
    framework: Any = ModuleType("tiny_agents")
    framework.Agent = type("Agent", (), {"name": "solver", "run": lambda self: current_identity()})
    framework.Agent.call_tool = lambda self, call_id, tool, arguments: tool.upper()
    sys.modules["tiny_agents"] = framework
    try:
        adapter.attach()
        assert framework.Agent().run() == Identity("solver")
        active = AttemptContext("r", 0, "http://127.0.0.1:9", "key", Recording())
        with running(active):
            assert framework.Agent().call_tool("c1", "search", {}) == "SEARCH"
        assert [(each.tool, each.tool_call_id) for each in active.recording.tool_results] == [("search", "c1")]
    finally:
        del sys.modules["tiny_agents"]


def _try_run_hooks(plugins: Plugins, built: Episode) -> None:
    hooks = plugins.hook
    rollout = Rollout(id="r", run="run", restart=0, group="g", member=0, task=built.task, mode=Mode.TRAIN, step=1)
    hooks.rollout_started(rollout, 0)
    hooks.rollout_finished(rollout, Attempt("r", 0, "w", 0.0, 1.0, Ending.FINISHED))
    hooks.policy_updated("default", 1, {})
    assert hooks.episode_built(built) is built
    assert hooks.episode_built(replace(built, result="I cannot answer.")).dropped is DropReason.PLUGIN
    assert hooks.failures == {}
    watching = sys.modules.get("watching") or sys.modules["my_agl_plugins.watching"]
    assert watching.seen == {"started": 1, Ending.FINISHED: 1, "updated": 1}


if __name__ == "__main__":
    exercise(Plugins.load())
