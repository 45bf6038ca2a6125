"""Identity and tool results, which adapters supply; stamping of requests; attaching without code.

The gateway alone records tokens. This package adds who made a call (a header of its HTTP request) and what the tools
did (in the attempt's recording, which the worker sends when the attempt ends).
"""

from agl_core.capture.attaching import attach, installed_adapters
from agl_core.capture.context import (
    AttemptContext,
    IdentityScope,
    current_attempt,
    current_identity,
    enter_identity,
    identify,
    running,
    state,
    unpack_variables,
)
from agl_core.capture.marking import ToolRun, agent, tool
from agl_core.capture.recording import Recording, describe_error, jsonable
from agl_core.capture.reports import (
    Latest,
    guarded,
    record_tool_result,
    report_problem,
    reward,
    wrap_once,
)
from agl_core.capture.standalone import Capture, CapturedRollout, ids_of, load_episodes, logprobs_of, save_episodes
from agl_core.capture.status import Decided, StatusRule, begins, failure_status, message_status, status_of
from agl_core.types import Identity

__all__ = [
    "AttemptContext",
    "Capture",
    "CapturedRollout",
    "Decided",
    "Identity",
    "IdentityScope",
    "Latest",
    "Recording",
    "StatusRule",
    "ToolRun",
    "agent",
    "attach",
    "begins",
    "current_attempt",
    "current_identity",
    "describe_error",
    "enter_identity",
    "failure_status",
    "guarded",
    "identify",
    "ids_of",
    "installed_adapters",
    "jsonable",
    "load_episodes",
    "logprobs_of",
    "message_status",
    "record_tool_result",
    "report_problem",
    "reward",
    "running",
    "save_episodes",
    "state",
    "status_of",
    "tool",
    "unpack_variables",
    "wrap_once",
]
