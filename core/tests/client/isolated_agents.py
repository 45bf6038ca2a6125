"""Agents of every temper, for processes of their own; each task says what to do after one LLM call."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy.random

from agl_core.capture import record_tool_result, reward
from agl_core.client.agent import AgentContext

CLIENT = httpx.Client(
    base_url=os.environ.get("OPENAI_BASE_URL", ""), headers={"Authorization": "Bearer anything"}, timeout=30
)
"""Made at import, before any attempt."""

STATE: list[int] = []
CLIENT_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")


CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def solve(task: Any, context: AgentContext) -> Any:
    CLIENT.post("/chat/completions", json=CALL).raise_for_status()
    return globals()[task.pop("does")](**task)


async def ask(base_url: str, key: str = "anything") -> None:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=30) as client:
        (await client.post(f"{base_url}/chat/completions", json=CALL)).raise_for_status()


async def block(file: str, context: AgentContext) -> int:
    """Hold the event loop up until there is this file."""
    await ask(context.base_url, context.api_key)
    while file and not os.path.exists(file):
        time.sleep(0.02)  # noqa: ASYNC251
    return os.getpid()


async def meet(file: str) -> Any:
    """Wait, in the first attempt, until the test says to go on; tell the process and its keys."""
    await ask(os.environ["OPENAI_BASE_URL"])
    logging.getLogger("an.agent").warning("%s met", os.getpid())
    with open(file, "a") as pids:  # noqa: ASYNC230
        pids.write(f"{os.getpid()}\n")
    while "go" not in os.listdir(os.path.dirname(file)):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return {"pid": os.getpid(), "keys": tell()["keys"]}


def tell() -> Any:
    STATE.append(1)
    return {
        "pid": os.getpid(),
        "seen": len(STATE),
        "random": [random.random(), float(numpy.random.random())],
        "folder": os.getcwd(),
        "files": os.listdir(),
        "keys": [name for name in os.environ if name.endswith("_KEY") and name not in CLIENT_KEYS],
    }


def report() -> float:
    reward(0.5, name="style")
    record_tool_result("o1", "lookup", ValueError("no such city"), tool_call_id="call_1")
    return 0.25


def report_and_die() -> None:
    report()
    os._exit(3)


def fail() -> None:
    raise KeyError("city")


def leave() -> None:
    sys.exit("I am leaving")


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def return_nonsense() -> object:
    return object()


def spin() -> None:
    while True:
        pass


def allocate(mib: int) -> int:
    return len(bytearray(mib * 2**20))


def end_when_told(file: str) -> str:
    """Ends once the file says so, and then says so itself; the process lingers until SIGKILL."""
    flag = Path(file)

    def exit_slowly() -> None:
        signal.signal(signal.SIGTERM, lambda *_: flag.write_text("deaf") and None)
        flag.write_text("ended")
        time.sleep(3600)

    atexit.register(exit_slowly)
    flag.write_text("running")
    while flag.read_text() != "end":
        time.sleep(0.01)
    return "late"


def stop_forker(again: bool) -> str:
    """A tool of the first attempt stops what starts processes, once or again and again."""
    if os.environ["AGL_ATTEMPT"] == "0":
        stop = f"os.kill({os.getppid()}, signal.SIGSTOP)"
        subprocess.run([sys.executable, "-c", f"import os, signal\n{stop}\nwhile {again}: {stop}"], check=True)
    return "done"


def start_family(file: str, then: str) -> str:
    """Processes that ignore SIGTERM: a child, one in a session of its own, and an orphan; their pids go to a file.

    It does nothing `then` if an attempt before it has such a file.
    """
    is_first = not Path(file).exists()
    deaf = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    note = f"open({file!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(3600)"
    for fork in ("", "os.setsid(); ", "os.fork() and os._exit(0); os.setsid(); "):
        subprocess.Popen([sys.executable, "-c", deaf + fork + note])
    while not Path(file).exists() or len(Path(file).read_text().splitlines()) < 3:
        time.sleep(0.01)
    if then == "ignore SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if then != "return" and is_first:
        time.sleep(3600)
    return "done"
