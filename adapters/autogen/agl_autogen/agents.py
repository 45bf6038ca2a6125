"""Who speaks: AgentChat's agents, agents on a runtime, and the attempt that a message between them belongs to."""

from __future__ import annotations

import functools
import uuid
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from autogen_core import AgentId, BaseAgent, SingleThreadedAgentRuntime

from agl_autogen import tools
from agl_core.capture import Identity, IdentityScope, guarded
from agl_core.capture.attach.methods import Arguments, Watch, argument, watch, wrap_once
from agl_core.capture.context import Carried


class _Turn(Watch):
    """An agent handles messages: the calls made meanwhile, also in tasks that it starts, are its calls."""

    def __init__(self, agent: str, around: Carried) -> None:
        scope = IdentityScope(Identity(agent, parent_span=uuid.uuid4().hex), around.scope)
        self._inside = replace(around, scope=scope)

    def applied(self) -> AbstractContextManager[None]:
        return self._inside.applied()

    @guarded
    def item(self, item: Any) -> None:
        if self._inside.attempt and type(item).__name__ == "ToolCallExecutionEvent":
            tools.answered(self._inside.attempt.recording, item.content)


class _MessageId(str):
    """The id of a message, with the attempt that sent it.

    A runtime handles messages in a task of its own, which may have been started in another attempt.
    """

    sent_by: Carried


@functools.cache
def attach() -> None:
    """Watch the agents on runtimes: the user's own, and the managers of AgentChat's teams."""
    watch(BaseAgent, ("on_message",), _handling)
    for name in ("send_message", "publish_message"):
        wrap_once(SingleThreadedAgentRuntime, name, _carrying)


@functools.cache
def attach_agentchat() -> None:
    """Watch what AgentChat's agents do with messages, those of the user's own classes included."""
    from autogen_agentchat.base import ChatAgent

    watch(ChatAgent, ("on_messages", "on_messages_stream"), _speaking)


def name_of(id: AgentId) -> str:
    """The name that the user gave; teams append their own id, which is the key.

    >>> name_of(AgentId("alice_77f1", "77f1")), name_of(AgentId("worker", "default"))
    ('alice', 'worker')
    """
    return id.type.removesuffix(f"_{id.key}")


def _speaking(agent: Any, arguments: Arguments) -> Watch | None:
    here = Carried.here()
    return _Turn(agent.name, here) if here.attempt else None


def _handling(agent: BaseAgent, arguments: Arguments) -> Watch | None:
    here, message_id = Carried.here(), getattr(argument(arguments, 1, "ctx"), "message_id", None)
    around = message_id.sent_by if isinstance(message_id, _MessageId) else here
    return _Turn(name_of(agent.id), around) if around.attempt or here.attempt else None


def _carrying(send: Any) -> Any:
    async def carrying(self: Any, *args: Any, message_id: str | None = None, **kwargs: Any) -> Any:
        carried = _MessageId(uuid.uuid4() if message_id is None else message_id)
        carried.sent_by = Carried.here()
        return await send(self, *args, message_id=carried, **kwargs)

    return carrying
