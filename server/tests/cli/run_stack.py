"""`agl run` as a user runs it: a real process, in a folder of its own, in front of a scripted upstream."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from agl_core.learning.transitions import build_episode
from agl_core.testing.scripts import Step
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Attempt, Episode, Rollout
from agl_server.store.sqlite import SqliteStore


@dataclass
class Bench:
    """A working folder and the upstream."""

    folder: Path
    upstream: ScriptedUpstream

    def script(self, name: str, code: str) -> Path:
        file = self.folder / name
        file.write_text(textwrap.dedent(code))
        return file

    def answers(self, *steps: Step) -> None:
        """Script the upstream; the first call of all is the one with which `agl run` tries it."""
        self.upstream.script(*steps)

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "OTEL_", "AGL_"))}
        return {**kept, "OPENAI_AGENTS_DISABLE_TRACING": "1", **variables}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", "from agl_core.cli import main; main()", *arguments]

    def agl(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """agl run --upstream … -- COMMAND"""
        return self.agl("run", "--upstream", self.upstream.url, "--", *command, **variables)

    def recorded(self, name: str = "capture") -> tuple[Rollout, Attempt, Episode]:
        """The one rollout of a run."""

        async def read() -> tuple[Rollout, Attempt, Episode]:
            async with SqliteStore(self.folder / "runs" / name / "store.sqlite", read_only=True) as store:
                [rollout] = await store.rollouts()
                [attempt] = await store.attempts(rollout.id)
                keys = [attempt.key]
                episode = build_episode(
                    rollout, attempt, await store.calls(keys), await store.tool_results(keys), await store.rewards(keys)
                )
                return rollout, attempt, episode

        return asyncio.run(read())
