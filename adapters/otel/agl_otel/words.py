"""The words in which frameworks without an adapter of their own tell a model that a tool failed.

They count where only the conversation is known; the frameworks' own spans, where there are any, say more.
"""

from __future__ import annotations

from agl_core.capture import StatusRule, begins
from agl_core.types import ToolStatus

STRANDS = (
    StatusRule(
        "strands",
        "`Unknown tool: look`",
        ToolStatus.ERROR,
        begins(r"Unknown\ tool:\ \S{1,200}\Z"),
        "strands-agents 1.62.0",
    ),
)

SEMANTIC_KERNEL = (
    StatusRule(
        "semantic-kernel",
        "`An error occurred while invoking the function town-look: …`, `The tool call arguments are malformed. …`, "
        "``The tool call with name `look` is not part of the provided tools, …``, "
        "`Missing required argument(s): ['city']. Please revise the arguments …`",
        ToolStatus.ERROR,
        begins(r"""
            An\ error\ occurred\ while\ invoking\ the\ function\ \S{1,200}:\s (?P<error> .* )
          | The\ tool\ call\ with\ name\ `[^`\n]{1,200}`\ is\ not\ part\ of\ the\ provided\ tools,
          | The\ tool\ call\ arguments\ are\ malformed\.
          | There\ are\ `\d+`\ tool\ call\ arguments\ required\ and\ only\ `\d+`\ received\.
          | (?: (?: Missing\ required | Received\ unexpected )\ argument\(s\):\ \[[^\]\n]{0,500}\]\.\ ){1,2}
            Please\ revise\ the\ arguments
        """),
        "semantic-kernel 1.45.0",
    ),
)

AGNO = (
    StatusRule(
        "agno",
        "`Error while decoding function arguments: …`",
        ToolStatus.ERROR,
        begins(r"Error\ while\ decoding\ function\ arguments:\s"),
        "agno 3.1.10",
    ),
)

OTHERS = (
    StatusRule(
        "camel",
        "`Tool execution failed: Error executing tool 'look': …`, "
        "`Tool execution failed: Tool 'look' not found in registered tools`",
        ToolStatus.ERROR,
        begins(r"""
            Tool\ execution\ failed:\ (?: Tool\ '[^'\n]{1,200}'\ not\ found\ in\ registered\ tools
              | Error\ executing\ (?: async\ )?tool\ '[^'\n]{1,200}':\s
                (?: Execution\ of\ function\ .{1,2000}?\.\ Error:\s )? (?P<error> .* ) )
        """),
        "camel-ai 0.2.90",
    ),
    StatusRule(
        "griptape",
        "`Activity input JSON validation error: …`, `action path not found`",
        ToolStatus.ERROR,
        begins(r"Activity\ input\ JSON\ validation\ error:\s | action\ (?: path | name )\ not\ found\Z"),
        "griptape 1.13.0",
    ),
    StatusRule(
        "mirascope",
        "`Tool 'look' not found in registered tools`",
        ToolStatus.ERROR,
        begins(r"Tool\ '[^'\n]{1,200}'\ not\ found\ in\ registered\ tools\Z"),
        "mirascope 2.8.2",
    ),
    StatusRule(
        "vercel",
        "`Model tried to call unavailable tool 'look'. …`, `Invalid input for tool look: …`",
        ToolStatus.ERROR,
        begins(
            r"Model\ tried\ to\ call\ unavailable\ tool\ '[^'\n]{1,200}'\."
            r" | Invalid\ input\ for\ tool\ [^\s:]{1,200}:\s"
        ),
        "ai 6.0.326",
    ),
)
"""Of frameworks that need nothing switched on, or make no spans."""
