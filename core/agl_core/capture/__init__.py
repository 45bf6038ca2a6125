"""Identity and outcomes: what adapters fill in; header stamping; attaching without code.

The gateway alone records tokens. What this package adds is who made a call (stamped on its HTTP request) and what
the tools did (collected in the attempt's recording, which the worker sends when the attempt ends).
"""

from agl_core.capture.alone import Capture, CapturedRollout
from agl_core.capture.attaching import Attachment, attach, installed_adapters
from agl_core.capture.context import (
    ActiveAttempt,
    IdentityScope,
    current_attempt,
    current_identity,
    enter_identity,
    identify,
    running,
)
from agl_core.capture.jsonable import jsonable
from agl_core.capture.marking import Marker, ToolRun, agent, tool
from agl_core.capture.recording import Recording, ToolRequest, describe_error, status_of
from agl_core.capture.reports import guarded, outcome_report, record_outcome, report_problem, reward
from agl_core.capture.variables import state, unpack_variables
from agl_core.types import Identity

__all__ = [
    "ActiveAttempt",
    "Attachment",
    "Capture",
    "CapturedRollout",
    "Identity",
    "IdentityScope",
    "Marker",
    "Recording",
    "ToolRequest",
    "ToolRun",
    "agent",
    "attach",
    "current_attempt",
    "current_identity",
    "describe_error",
    "enter_identity",
    "guarded",
    "identify",
    "installed_adapters",
    "jsonable",
    "outcome_report",
    "record_outcome",
    "report_problem",
    "reward",
    "running",
    "state",
    "status_of",
    "tool",
    "unpack_variables",
]
