"""Identity and tool results, which adapters supply; stamping of requests; attaching without code.

The gateway alone records tokens. This package adds who made a call (a header of its HTTP request) and what the tools
did (in the attempt's recording, which the worker sends when the attempt ends).
"""

from agl_core.capture.attaching import attach as attach
from agl_core.capture.attaching import installed_adapters as installed_adapters
from agl_core.capture.context import AttemptContext as AttemptContext
from agl_core.capture.context import IdentityScope as IdentityScope
from agl_core.capture.context import current_attempt as current_attempt
from agl_core.capture.context import current_identity as current_identity
from agl_core.capture.context import enter_identity as enter_identity
from agl_core.capture.context import identify as identify
from agl_core.capture.context import running as running
from agl_core.capture.context import state as state
from agl_core.capture.context import unpack_variables as unpack_variables
from agl_core.capture.marking import AgentRun as AgentRun
from agl_core.capture.marking import ToolRun as ToolRun
from agl_core.capture.marking import agent as agent
from agl_core.capture.marking import tool as tool
from agl_core.capture.recording import Recording as Recording
from agl_core.capture.recording import describe_error as describe_error
from agl_core.capture.recording import jsonable as jsonable
from agl_core.capture.reports import Latest as Latest
from agl_core.capture.reports import guarded as guarded
from agl_core.capture.reports import prompt as prompt
from agl_core.capture.reports import record_tool_result as record_tool_result
from agl_core.capture.reports import report_problem as report_problem
from agl_core.capture.reports import reward as reward
from agl_core.capture.status import Decided as Decided
from agl_core.capture.status import StatusRule as StatusRule
from agl_core.capture.status import begins as begins
from agl_core.capture.status import failure_status as failure_status
from agl_core.capture.status import message_status as message_status
from agl_core.capture.status import status_of as status_of
from agl_core.capture.watching import watch as watch
from agl_core.capture.watching import wrap_once as wrap_once
from agl_core.types import Identity as Identity
