"""Plays agents of each framework and scores what agl and other recorders say of them.

    python -m tests.benchmarks.capture

plays every framework of this environment, each form of attaching in a process of its own, and writes one file each to
tests/benchmarks/capture/results; then docs/capture.md and docs/capture.json. A framework that lives in an environment
of its own is played there, with its driver (`make bench-capture` plays them all):

    python -m tests.benchmarks.capture --driver their_module:TheirDriver

`--since FILE` leaves out those whose results are newer than this file, so that an interrupted run goes on. `--page`
writes only the page, from the files that are there.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import subprocess
import sys
import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import Any

from agl_core.testing.adapters.driver import CHAT, Driver

from ...support.testing_aids import fast_clients
from . import page
from .playing import play_all, tasks_of_agl, tasks_of_others
from .recorders import RECORDERS
from .results import Result, merged, path_of, read, result_of, write

HERE = "tests.benchmarks.capture"
OURS = (
    "tests.conformance.drivers.langgraph_agents:LangChain",
    "tests.conformance.drivers.autogen_teams:AutoGen",
    "tests.conformance.drivers.sdk_agents:OpenAIAgents",
    "tests.conformance.drivers.opentelemetry_spans:OpenTelemetry",
    "tests.conformance.drivers.by_hand:ByHand",
    "tests.conformance.drivers.by_hand:ByHeaders",
    f"{HERE}.other_clients:OtherClients",
)
"""The drivers of this environment."""
NOT_COMPARED = ("ByHeaders",)
"""It sends the headers of agl: without them it is the driver before it."""
AGL = "agl"
PART = "part.json"


def driver_of(name: str) -> Driver:
    """The driver that `module:Class` names."""
    module, _, kind = name.partition(":")
    try:
        driver: Driver = getattr(importlib.import_module(module), kind)()
    except (ImportError, AttributeError) as error:
        sys.exit(f"--driver {name}: {error}. Name an importable module and its Driver: module:Class.")
    if not driver.packages:
        sys.exit(f"--driver {name}: it has no `packages`. Name there the distributions whose versions the page shows.")
    return driver


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", action="append", metavar="MODULE:CLASS", help="play this one; repeatable")
    parser.add_argument("--since", type=Path, metavar="FILE", help="not what was played after this file was written")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--part", nargs=2, metavar=("FORM", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        form, folder = options.part
        write(asyncio.run(_played(options.driver[0], form)), Path(folder) / PART)
        return 0
    if not options.page:
        for name in options.driver or OURS:
            _play_in_parts(name, options.since)
    page.write()
    return 0


def _play_in_parts(name: str, since: Path | None) -> None:
    """Each form of attaching gets a process: what it leaves in there, the next one must not find."""
    driver, found = driver_of(name), []
    path = path_of(driver)
    if since is not None and path.exists() and path.stat().st_mtime > since.stat().st_mtime:
        return
    with tempfile.TemporaryDirectory() as folder:
        for form in driver.forms:
            sys.stderr.write(f"{driver.name}: {form}\n")
            command = [sys.executable, "-m", HERE, "--driver", name, "--part", form, folder]
            subprocess.run(command, check=True)
            found.append(read(Path(folder) / PART))
    write(merged(found), path)


async def _played(name: str, form: str) -> Result:
    """One form; with the first one, the other recorders too, after agl and with nothing attached."""
    driver = driver_of(name)
    others = form == driver.forms[0] and CHAT in driver.apis and type(driver).__name__ not in NOT_COMPARED
    found = []
    asyncio.get_running_loop().set_exception_handler(_say_unless_closed)
    with fast_clients():
        for recorder in RECORDERS.values() if others else [RECORDERS[AGL]]:
            tasks = tasks_of_agl(driver, form) if recorder.name == AGL else tasks_of_others(driver)
            async with aclosing(play_all(recorder, tasks)) as playing:
                found.append(result_of(driver, recorder.name, [each async for each in playing]))
    return merged(found)


def _say_unless_closed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Clients whose thread has ended are closed by the garbage collector, in another loop; that is no news."""
    if str(context.get("exception")) != "Event loop is closed":
        loop.default_exception_handler(context)


if __name__ == "__main__":
    sys.exit(main())
