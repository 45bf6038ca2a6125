"""Who speaks, and what the tools did: AgentChat's agents, agents on a runtime, and tools, in a workbench or not."""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autogen_core import AgentId, BaseAgent, SingleThreadedAgentRuntime
from autogen_core.tools import BaseTool, ToolResult, Workbench

from agl_core.capture import AgentRun, ToolRun, guarded, message_status, wrap_once
from agl_core.capture.context import HERE, Here, holding
from agl_core.capture.marking import open_runs
from agl_core.capture.watching import Enter, in_rollout, within


class _MessageId(str):
    """The id of a message, with the attempt that sent it.

    A runtime handles messages in a task of its own, which may have been started in another attempt.
    """

    sent_by: Here


@functools.cache
def attach() -> None:
    """Watch every tool and workbench, and the agents on runtimes: the user's own, and the managers of teams."""
    _watch_all(BaseAgent, ("on_message",), _handling)
    for name in ("send_message", "publish_message"):
        wrap_once(SingleThreadedAgentRuntime, name, _carrying)
    _watch_all(Workbench, ("call_tool", "call_tool_stream"), _in_workbench)
    _watch_all(BaseTool, ("run_json", "run_json_stream"), _by_itself)


@functools.cache
def attach_agentchat() -> None:
    """Watch what AgentChat's agents do with messages, those of the user's own classes included."""
    from autogen_agentchat.base import ChatAgent

    _watch_all(
        ChatAgent, ("on_messages", "on_messages_stream"), lambda agent, *_, **__: AgentRun(agent.name, "autogen")
    )


def _watch_all(root: type[Any], names: tuple[str, ...], enter: Enter) -> None:
    """Watch methods of `root` and of all its subclasses, those defined later included."""
    inherited = root.__dict__.get("__init_subclass__")
    wrap = within(functools.partial(in_rollout, enter), streams=True)

    def watch_own(kind: type[Any]) -> None:
        for name in names:
            method = kind.__dict__.get(name)
            if inspect.isfunction(method) and not getattr(method, "__isabstractmethod__", False):
                wrap_once(kind, name, wrap)

    def init_subclass(cls: Any, /, **options: Any) -> None:
        if inherited is None:
            super(root, cls).__init_subclass__(**options)
        else:
            inherited.__func__(cls, **options)
        watch_own(cls)

    kinds = [root]
    for kind in kinds:
        kinds += kind.__subclasses__()
        watch_own(kind)
    root.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]


def name_of(id: AgentId) -> str:
    """The name that the user gave; teams append their own id, which is the key.

    >>> name_of(AgentId("alice_77f1", "77f1")), name_of(AgentId("worker", "default"))
    ('alice', 'worker')
    """
    return id.type.removesuffix(f"_{id.key}")


@contextmanager
def _handling(agent: BaseAgent, message: Any = None, ctx: Any = None, **_: Any) -> Iterator[None]:
    """An agent handles a message: the calls made meanwhile, also in tasks that it starts, are its calls."""
    message_id = getattr(ctx, "message_id", None)
    around = message_id.sent_by if isinstance(message_id, _MessageId) else Here.now()
    with holding(HERE, around), in_rollout(AgentRun, name_of(agent.id), "autogen"):
        yield


def _carrying(send: Any) -> Any:
    async def carrying(self: Any, *args: Any, message_id: str | None = None, **kwargs: Any) -> Any:
        carried = _MessageId(uuid.uuid4() if message_id is None else message_id)
        carried.sent_by = Here.now()
        return await send(self, *args, message_id=carried, **kwargs)

    return carrying


class _ToolRun(ToolRun):
    """A tool runs, by itself or in a workbench, which makes a text of its exception.

    A workbench's tool, or an overridden base class of a tool, is the same run: it tells the outer one its exception.
    """

    def __init__(self, tool: str, id: str | None, arguments: Any, of: BaseTool[Any, Any] | Workbench) -> None:
        super().__init__(tool, id or None, arguments, "autogen", of=of)
        self.result, self._id = None, id
        self._raised: BaseException | None = None
        around = next(open_runs("autogen"), None)
        is_part = isinstance(around, _ToolRun) and (around.of is of or isinstance(around.of, Workbench))
        self._same = around if isinstance(around, _ToolRun) and is_part and around._id == id else None

    @guarded
    def end(self, error: BaseException | None) -> None:
        error = error or self._raised
        result: Any = self.result
        if self._same is not None:
            self._same._raised, self.only_failures, error = error, True, None
        elif error is None and isinstance(self.of, BaseTool):
            self.result = self.of.return_value_as_string(result)
            self.decided = message_status(self.result)
        elif error is None and isinstance(result, ToolResult):
            self.result = result.to_text(replace_image="[image]")
            self.decided = message_status(self.result, "error" if result.is_error else None)
        else:
            self.only_failures = True
        super().end(error)


def _in_workbench(
    workbench: Workbench, name: str, arguments: Any = None, _: Any = None, call_id: str | None = None, **__: Any
) -> ToolRun:
    return _ToolRun(name, call_id, arguments, workbench)


def _by_itself(tool: BaseTool[Any, Any], args: Any, _: Any = None, call_id: str | None = None, **__: Any) -> ToolRun:
    return _ToolRun(tool.name, call_id, args, tool)
