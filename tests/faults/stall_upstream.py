"""A scripted model server as a process: it asks for the tool `search` once, and then answers."""

from __future__ import annotations

import asyncio
import sys

from agl_core.testing.scripts import CallTools, Received, Say
from agl_core.testing.upstream import ScriptedUpstream


def answer(received: Received) -> CallTools | Say:
    return Say("found") if received.turns else CallTools([("search", {"query": "it"})])


async def main() -> None:
    async with ScriptedUpstream() as upstream:
        upstream.answer = answer
        sys.stdout.write(f"{upstream.url}\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
