"""How the adapter is found and attached without code."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any


def run(program: str, *arguments: str, folder: Path | None = None) -> None:
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr


def test_an_unmodified_agent_is_seen_after_agl_attaches(server: Any) -> None:
    program = """
        import sys
        import agl_core
        from agl_core.capture import ActiveAttempt, Recording, running

        attachment = agl_core.attach()
        assert "agents" not in sys.modules

        from agents import Agent, Runner

        with running(ActiveAttempt("r1", 0, sys.argv[1], "key", Recording())):
            Runner.run_sync(Agent(name="solver", model="m"), "hello")
        assert not attachment.failed
    """
    run(program, server.root)
    assert [(request.rollout, request.agent) for request in server.received] == [("r1/0", "solver")]


def test_a_module_of_the_users_own_that_is_called_agents(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text("names = ['alice']\n")
    program = """
        import logging, sys
        import agl_core

        logging.basicConfig(stream=sys.stdout)
        attachment = agl_core.attach()
        import agents

        assert agents.names == ["alice"]
        assert not attachment.failed, attachment.failed
    """
    run(program, folder=tmp_path)
