"""The components of this package."""

from __future__ import annotations

from functools import partial

from agl_core import hookimpl
from agl_core.config.sections import Section
from agl_core.kinds import CONFIG_TABLE, HARNESS, REWARD, Register
from agl_harnesses.grading import TestsPassOptions, tests_pass
from agl_harnesses.grading import diff_size as diff_size
from agl_harnesses.grading import untouched as untouched
from agl_harnesses.harbor import harbor as harbor
from agl_harnesses.harbor import harbor_reward
from agl_harnesses.tasks import swe as swe
from agl_harnesses.verifiers import verifiers_reward as verifiers_reward
from agl_harnesses.verifiers import verifiers_tasks as verifiers_tasks
from agl_harnesses.workspace import WorkspaceSection


@hookimpl
def register_components(register: Register) -> None:
    from agl_harnesses.harness import CommandOptions, ProgramHarness, ProgramOptions, command_harness
    from agl_harnesses.programs import PROGRAMS

    for program in PROGRAMS:
        doc = f"Starts `{program.command[0]}`."
        register(HARNESS, program.name, partial(ProgramHarness, program), options=ProgramOptions, doc=doc)
    register(HARNESS, "command", command_harness, options=CommandOptions)
    register(CONFIG_TABLE, "workspace", lambda options: options, options=WorkspaceSection, doc=WorkspaceSection.__doc__)
    register(REWARD, "tests_pass", tests_pass, options=TestsPassOptions)
    register(REWARD, "harbor", harbor_reward, options=Section)
