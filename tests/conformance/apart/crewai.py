"""What CrewAI plays; `crewai_agents.py` builds it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from unittest import mock

from agl_core.testing.adapters.driver import ATTACH, CHAT, MESSAGES, RESPONSES, Driver, Gap, Program, Scenario, Setting

from ...support.testing_aids import only_this_machine

ONE_LINE = "agl_crewai.attach()"


class CrewAI(Driver):
    """Each agent has a crew of one task. Experts are tools that start a crew of their own.

    CrewAI's agents and tasks keep what they did: rollouts share the LLMs, and each has crews of its own.
    """

    name = "CrewAI (agl-crewai)"
    apis = (CHAT,)
    without = {  # noqa: RUF012
        RESPONSES: "The tests play CrewAI's default API.",
        MESSAGES: "The tests play CrewAI's default API.",
    }
    forms = (ATTACH, ONE_LINE)
    gaps = (
        Gap("handoff", "CrewAI has no handoff: delegated work returns to the agent that delegated it."),
        Gap("text ReAct", "CrewAI has a text format of its own, which is tested apart."),
    )
    packages = ("crewai",)

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        from .crewai_agents import program

        return program(scenario, setting, with_line=setting.form == ONE_LINE)

    @contextlib.contextmanager
    def attached(self, form: str) -> Iterator[None]:
        """Meanwhile nothing leaves the machine, and what CrewAI stores is not in the user's home."""
        with (
            only_this_machine(),
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            mock.patch.dict(os.environ, CREWAI_STORAGE_DIR=folder),
            super().attached(form),
        ):
            yield


DRIVER = CrewAI
"""By the name that the Makefile knows."""
