"""The page says what the drivers say; a third party's driver runs; adapters attach without code and break no agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agl_core.capture
from agl_core.capture import IdentityScope, Recording
from agl_core.testing.scripts import CallTools, Say
from agl_server.testing import running_stack

from ..support.testing_aids import blocks
from .driver import Driver, Gap, Program, Scenario, Setting
from .drivers import DRIVERS, ByHand, ByHeaders
from .example_driver import TinyDriver
from .make_page import PAGE, render
from .scenarios import SCENARIOS, cells, turns


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == render(page), "python -m tests.conformance.make_page"


def test_scenarios_have_names_of_their_own_and_agents_known_by_their_prompts() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    for scenario in SCENARIOS:
        names = [agent.name for agent in scenario.everyone()]
        assert len(set(names)) == len(names)
        assert {turn.agent for turn in turns(scenario)} == set(names)


HERE = Path(__file__).parent


@pytest.mark.storm
def test_one_command_plays_the_driver_of_a_third_party(tmp_path: Path) -> None:
    shutil.copy(HERE / "example_driver.py", tmp_path / "their_module.py")
    command = [sys.executable, "-m", "pytest", HERE / "test_conformance_cells.py", "-q", "-rA"]
    played = subprocess.run(
        [*command, "--driver", "their_module:TinyDriver", "-p", "no:cacheprovider", "-p", "no:timeout"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert played.returncode == 0, played.stdout
    assert len(re.findall(r"PASSED .*test_cell\[tiny \|", played.stdout)) == 17
    assert played.stdout.count("PASSED") == 17


class Nameless(TinyDriver):
    """Does not say who calls."""

    @contextlib.contextmanager
    def attached(self, form: str) -> Iterator[None]:
        with super().attached(form), pytest.MonkeyPatch.context() as patch:
            patch.setattr(agl_core.capture, "identify", lambda agent: contextlib.nullcontext())
            yield


class Schemaless(ByHand):
    """Asks for any answer."""

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        agents = tuple(replace(agent, answers=None) for agent in scenario.agents)
        return super().build(replace(scenario, agents=agents), setting)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("driver", "scenario", "fault"),
    [
        (Nameless(), "parallel tools", "the agent of"),
        (Schemaless(), "structured output", "clerk is to answer by a schema"),
    ],
    ids=["names", "a schema"],
)
async def test_what_is_wrong_with_a_driver_is_found(
    driver: Driver, scenario: str, fault: str, bench: Any, cell_of: Any
) -> None:
    with pytest.raises(AssertionError, match=fault):
        await bench.check(cell_of(driver, scenario))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_gap_that_passes_is_refused(bench: Any, cell_of: Any) -> None:
    class Modest(TinyDriver):
        gaps = (*TinyDriver.gaps, Gap("parallel tools", "We thought so."))

    with pytest.raises(AssertionError, match="although it is declared a gap"):
        await bench.check(cell_of(Modest(), "parallel tools"))
    await bench.check(cell_of(Modest(), "fifteen tool calls"))


def test_a_gap_that_covers_nothing_is_refused() -> None:
    class Careless(TinyDriver):
        gaps = (Gap("parallel tolls", "A slip."),)

    with pytest.raises(ValueError, match="parallel tolls"):
        list(cells([Careless()]))


ROOT = Path(__file__).parents[2]


PROGRAM = """
    import json, os, sys
    import agl_core
    from agl_core.capture import AttemptContext, Recording, running

    attachment = agl_core.attach()
    assert not {"agents", "autogen_core", "langchain_core", "opentelemetry"} & set(sys.modules)
    exec(sys.argv[1])
    for page, url, rollout, root, key in json.loads(sys.argv[2]):
        os.environ.update(OPENAI_BASE_URL=url, OPENAI_API_KEY=key)
        exec(page, {})
        active = AttemptContext(rollout, 0, root, key, Recording())
        with running(active):
            exec(page, {})
        assert not attachment.failed, attachment.failed
        assert not active.recording.problems, active.recording.problems
        print(*(f"{each.agent}:{each.tool}:{each.status}" for each in active.recording.tool_results), flush=True)
        print(end="\\f")
        if "agents" in sys.modules:
            sys.modules["agents"].set_trace_processors([])  # Nothing is sent to the SDK's vendor.
"""
ADD = (CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
SCRIPTS = {"langchain": ADD, "openai-agents": ADD, "autogen": ADD, "otel": (Say("look up 1 + 2"), Say("3"))}
RESULTS = dict.fromkeys(SCRIPTS, "solver:add:ok\n") | {"otel": "solver:look_up:ok\n"}


@pytest.mark.parametrize(
    ("first", "adapters"),
    [("", list(SCRIPTS)), ("import autogen_ext.models.openai", ["autogen"])],
    ids=["all", "autogen-ext first"],
)
async def test_the_agents_of_pages_print_what_the_pages_say_and_in_a_rollout_they_are_seen(
    first: str, adapters: list[str]
) -> None:
    """In a process of its own, where agl attaches before any framework is imported."""
    readmes = [ROOT / "adapters" / adapter / "README.md" for adapter in adapters]
    async with running_stack() as stack:
        stack.upstream.script(*(step for adapter in adapters for step in SCRIPTS[adapter] * 2))
        attempts = [await stack.attempt() for _ in adapters]
        pages = [
            ("\n".join(blocks(readme, "python")), stack.url(a.key), a.key.rollout, a.active.base_url, a.active.api_key)
            for readme, a in zip(readmes, attempts, strict=True)
        ]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", textwrap.dedent(PROGRAM), first, json.dumps(pages)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, wrong = await process.communicate()
        assert process.returncode == 0, wrong.decode()
        for attempt in attempts:
            assert await attempt.agents() == [None, None, "solver", "solver"]
    for readme, adapter, printed in zip(readmes, adapters, out.decode().split("\f"), strict=False):
        assert printed.removesuffix(RESULTS[adapter]) in blocks(readme), printed


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("driver", [d for d in DRIVERS if not isinstance(d, ByHeaders)], ids=lambda d: d.name)
async def test_an_adapter_that_fails_does_not_break_the_agent(
    driver: Driver, bench: Any, monkeypatch: pytest.MonkeyPatch, cell_of: Any
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(IdentityScope, "__init__", fail)
    monkeypatch.setattr(Recording, "tool_result", fail)
    faults, (performed,) = await bench.perform(cell_of(driver, "parallel tools"))
    assert (faults, len(performed.calls)) == ([], 2)
    assert any("KeyError: 'a bug'" in problem for problem in performed.attempt.active.recording.problems)
