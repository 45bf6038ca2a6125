"""Makers of episodes for the tests of reward and credit rules, and a model server for those of the judge."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from agl_core import kinds
from agl_core.kinds import Kind
from agl_core.plugins import Plugins
from agl_core.testing import episodes
from agl_core.testing.scripts import Fail, Raw, Received, Step
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Episode, Task, ToolResult, ToolStatus, Transition

PLUGINS = Plugins.load()
transition = episodes.transition


def rule(kind: Kind, name: str, **settings: Any) -> Any:
    """A registered rule, built from its settings as a run would."""
    component = PLUGINS.component(kind, name, "[test]")
    return component.build(component.options.model_validate(settings), *([None] if kind == kinds.REWARD else []))


def tool_result(status: str = "ok", tool: str = "search", **more: Any) -> ToolResult:
    return ToolResult(f"{tool} {status}", "r", 0, tool, ToolStatus(status), **more)


def episode(
    *transitions: Transition | Sequence[ToolResult],
    question: Any = "a question",
    metadata: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Episode:
    """An episode; a list of tool results stands for the transition that asked for them."""
    whole = [t if isinstance(t, Transition) else transition(i, *t) for i, t in enumerate(transitions)]
    return episodes.episode(*whole, task=Task("t1", question, metadata=metadata or {}), **changes)


class Asked:
    """A request to a judge, as one reads it who trusts nothing between the two lines around the material."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.request = request
        self.system, self.user = (message["content"] for message in request["messages"])
        opening, text, closing, *after = self.user.split("\n")
        assert opening == closing
        assert f"'{opening}'" in self.system
        assert opening not in text
        self.material = json.loads(text)
        self.labels: list[str] = re.findall(r'"(\w+)": N', "\n".join(after))


class Endpoint(ScriptedUpstream):
    """A judge: it answers `reply` with a label for LABEL, unless `judgement` makes another of the request."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = self._judge
        self.reply: str | None = '{"LABEL": 7}'
        self.judgement: Callable[[Asked], Any] = lambda asked: (
            self.reply and self.reply.replace("LABEL", asked.labels[0])
        )
        """A text, or what is its JSON."""
        self.status = 200
        self.has_format = True
        """True if it takes a `response_format`."""
        self.delay = 0.0
        """Seconds before each answer."""

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [{"path": received.path, **received.body} for received in self.received]

    @property
    def authorizations(self) -> list[str | None]:
        return [received.headers.get("Authorization") for received in self.received]

    def judge(self, name: str = "judge", **settings: Any) -> Any:
        """The reward rule that asks this endpoint."""
        given = {"base_url": self.url, "model": "m", "rubric": "Be {polite}.", **settings}
        return rule(kinds.REWARD, name, **given)

    async def _judge(self, received: Received) -> Step:
        await asyncio.sleep(self.delay)
        status = self.status if self.has_format or "response_format" not in received.body else 400
        if status != 200:
            return Fail(status)
        content = self.judgement(Asked(received.body))
        content = content if isinstance(content, str | None) else json.dumps(content)
        return Raw(json.dumps({"choices": [{"message": {"content": content}}]}).encode())


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr("agl_rewards.judge.RETRY_WAITS", (0.0, 0.0))
    endpoint = Endpoint()
    with endpoint:
        yield endpoint
