"""Reports on their way from an agent's processes to the one that started it: a file of JSON lines for each process.

A line is written when its report is made, so that nothing is lost with a process that is killed.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from agl_core.capture.recording import Recording
from agl_core.types import Source
from agl_core.wire.workers import RewardReport, ToolResultReport

logger = logging.getLogger(__name__)


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tool_result: ToolResultReport | None = None
    reward: RewardReport | None = None
    problem: str | None = None


class SpooledRecording(Recording):
    """A recording that also writes each report into `folder`, also in the processes that are forked from this one."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def tool_result(self, report: ToolResultReport) -> None:
        super().tool_result(report)
        self._write(_Line(tool_result=report))

    def reward(self, report: RewardReport) -> None:
        super().reward(report)
        self._write(_Line(reward=report))

    def problem(self, text: str) -> bool:
        is_new = super().problem(text)
        if is_new:
            self._write(_Line(problem=text))
        return is_new

    def _write(self, line: _Line) -> None:
        data = line.model_dump_json(exclude_none=True).encode() + b"\n"
        try:
            # Opened for each line: what one write appends is whole, whichever thread or fork makes it.
            file = os.open(self._folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, data)
            finally:
                os.close(file)
        except OSError as error:
            logger.warning("A report to agl could not be written and is missing from the record: %s.", error)


def read_spool(folder: Path, recording: Recording) -> None:
    """Add what all processes reported below `folder`; what cannot be read is a problem of the recording.

    Any process that the command started could write there, whatever a report says of its source.
    """
    for file in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        for text in file.read_bytes().splitlines():
            try:
                line = _Line.model_validate_json(text)
            except ValidationError as error:
                recording.problem(f"A report of process {file.stem} cannot be read: {error.errors()[0]['msg']}")
                continue
            if line.tool_result is not None:
                recording.tool_result(line.tool_result.model_copy(update={"source": Source.COMMAND}))
            if line.reward is not None:
                recording.reward(line.reward)
            if line.problem is not None:
                recording.problem(line.problem)
