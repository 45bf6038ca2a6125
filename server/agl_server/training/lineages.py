"""Lineages: the calls of an attempt as a tree of conversations, without those that a program made for itself.

    main ──▶ call ──▶ call ──────────────────▶ call     compaction ──▶ call ──▶ …
                       ├─ sub-agent ──▶ call               ▲
                       └─ sub-agent ──▶ call ──▶ call      └ has the summary, or the first message, of a longer one

A call *continues* a call of the same agent, with the same instructions or tools, if its messages begin with that call's
and its reply, as far as the program repeats it: both are of one lineage. Agents that write their prompt anew for each
call stay in one, too. Any other call begins a lineage; `LineageKind` says how.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import eq
from typing import Any, NamedTuple

from agl_core.capture.status import message_text
from agl_core.learning.tool_results import function_of, messages_of, tool_calls_of, tools_of
from agl_core.learning.transitions import build_episode, counted_calls
from agl_core.types import HOUSEKEEPING, Call, Episode, Housekeeping, Json, Lineage, LineageKind, RecordedRollout
from agl_core.types.episodes import Thread

_MAX_ASIDE = 400
"""Characters of a reply that structure takes for housekeeping: a title, a topic, a verdict."""
_MIN_QUOTE = 20
"""Characters from which on a text that is part of another one is not there by chance."""


class Place(NamedTuple):
    """A call's place in the tree."""

    lineage: Lineage
    agent_turn: int
    """0, 1, … in its lineage."""
    housekeeping: Housekeeping | None


def episode_of(recorded: RecordedRollout) -> Episode:
    """The episode of what was recorded, with all its rewards, its lineages, and its housekeeping apart."""
    r = recorded
    episode = build_episode(r.rollout, r.attempt, r.calls, r.tool_results, r.rewards, r.annotations)
    calls = counted_calls(r.attempt, r.calls)
    places = {call.id: place for call, place in zip(calls, places_of(calls, r.attempt.result), strict=True)}
    placed = [replace(t, **places[t.key.call]._asdict()) for t in episode.transitions]
    work, own = ([t for t in placed if (t.housekeeping is None) is is_work] for is_work in (True, False))
    return replace(episode, transitions=tuple(work), housekeeping=tuple(own))


def places_of(calls: Sequence[Call], result: Json = None) -> list[Place]:
    """The place of each of an attempt's calls, which are in the order of their starts; `result` is the attempt's."""
    known = dict[str, _Node]()
    nodes = [_Node.of(call, known) for call in calls]
    marks = {
        node: node.call.housekeeping or Housekeeping.SETTING
        for node in nodes
        if node.call.housekeeping or node.call.agent == HOUSEKEEPING
    }
    tree = _Tree([node for node in nodes if node not in marks])
    if asides := _asides(tree, [*_texts_in(result)]):
        marks |= dict.fromkeys(asides, Housekeeping.STRUCTURE)
    if marks:
        tree = _Tree([*(node for node in nodes if node not in marks), *marks])
    threads = _threads(nodes, tree.lineages, marks)
    lineages = [replace(lineage, thread=threads[lineage.number]) for lineage in tree.lineages]
    return [Place(lineages[node.number], node.turn, marks.get(node)) for node in nodes]


def _threads(nodes: Sequence[_Node], lineages: Sequence[Lineage], marks: Collection[_Node]) -> Mapping[int, Thread]:
    """The thread of each lineage, by number.

    A lineage that a call started has its own if the thread around it is called again later. Compactions, and lineages
    that nothing started or that nothing comes after, go on in the thread that was there.
    """
    places = {node.call.id: (turn, node.number) for turn, node in enumerate(nodes)}
    parents = [places.get(lineage.parent or "") for lineage in lineages]
    heads = list[int]()
    for lineage, parent in zip(lineages, parents, strict=True):
        is_started = parent is not None and lineage.kind is not LineageKind.COMPACTION
        heads.append(lineage.number if is_started else heads[parent[1]] if parent else 0)
    last = {heads[node.number]: turn for turn, node in enumerate(nodes) if node not in marks}
    threads: dict[int, Thread] = {0: ()}
    ends: dict[Thread, int] = {(): last.get(0, -1)}
    for turn, node in enumerate(nodes):
        if (number := node.number) not in threads:
            parent = parents[number]
            thread = threads[parent[1]] if parent else ()
            if parent and heads[number] == number and ends[thread] > turn:
                thread = (*thread, (parent[0], turn))
            threads[number] = thread
            ends[thread] = max(ends.get(thread, -1), last.get(number, -1))
    return threads


@dataclass(slots=True, eq=False)
class _Node:
    """A call, and what of it tells its place."""

    call: Call
    system: str
    """The instructions at its beginning."""
    tools: frozenset[str]
    messages: Sequence[Mapping[str, Any]]
    """Its messages after the instructions."""
    texts: list[tuple[Json, str]]
    """Role and text of each of these messages."""
    prefixes: list[int]
    """Digests of the first 0, 1, … of these messages."""
    replies: Sequence[tuple[int, str]]
    """For each choice, the digest of all messages with it, and its text."""
    opening: str
    """The messages before the first of the model."""
    number: int = 0
    turn: int = 0
    before: _Node | None = None
    after: _Node | None = None

    @classmethod
    def of(cls, call: Call, known: dict[str, _Node]) -> _Node:
        """`known` has the latest node by its first messages: a long conversation is read once, not at each call."""
        every = messages_of(call)
        start = next((at for at, m in enumerate(every) if m.get("role") not in ("system", "developer")), len(every))
        messages = every[start:]
        last = known.get(key := repr(messages[:2]))
        same = sum(takewhile(bool, map(eq, messages, last.messages))) if last else 0
        texts, prefixes = (last.texts[:same], last.prefixes[: same + 1]) if last else ([], [0])
        for message in messages[same:]:
            texts.append((message.get("role"), message_text(message.get("content")).strip()))
            prefixes.append(hash((prefixes[-1], _meaning(message))))
        opening = takewhile(lambda told: told[0] != "assistant", texts)
        known[key] = cls(
            call,
            "\n".join(message_text(message.get("content")).strip() for message in every[:start]),
            frozenset(function_of(tool)[0] for tool in tools_of(call)),
            messages,
            texts,
            prefixes,
            [
                (hash((prefixes[-1], _meaning({**m, "role": "assistant"}))), message_text(m.get("content")).strip())
                for m in (choice.message for choice in call.choices)
            ],
            "\n".join(text for _, text in opening),
        )
        return known[key]

    @property
    def is_one_turn(self) -> bool:
        return all(role != "assistant" for role, _ in self.texts)

    def is_alike(self, other: _Node) -> bool:
        """True if both have the same agent, and its instructions or tools."""
        has_same_tools = bool(self.tools) and self.tools == other.tools
        return self.call.agent == other.call.agent and (self.system == other.system or has_same_tools)

    def quotes(self, earlier: _Node, shortest: int) -> bool:
        """True if its messages have a reply of an earlier call, of so many characters at least."""
        long = [text for _, text in earlier.replies if len(text) >= shortest]
        return any(_is_part(text, own) for text in long for _, own in self.texts)

    def is_told(self, earlier: _Node) -> bool:
        """True if its last message, the user's, has a reply of an earlier call."""
        role, own = self.texts[-1] if self.texts else ("", "")
        return role == "user" and any(len(text) >= _MIN_QUOTE and text in own for _, text in earlier.replies)


def _meaning(message: Mapping[str, Any]) -> tuple[Json, ...]:
    """The part of a message that is the same, however a program repeats it."""
    called = (json.dumps([call["id"], *function_of(call)], sort_keys=True) for call in tool_calls_of(message))
    answers = str(message.get("tool_call_id"))
    return str(message.get("role")), message_text(message.get("content")).strip(), *called, answers


def _is_part(text: str, of: str) -> bool:
    return text == of or (len(text) >= _MIN_QUOTE and text in of)


def _asides(tree: _Tree, result: Sequence[str]) -> list[_Node]:
    """Housekeeping by structure.

    It is a single call of a known program, without tools, and with other instructions than the program's longest
    lineage with tools has. Its reply is short, and neither quoted later (if it has not quoted itself what it was asked)
    nor in the `result`. A call that an adapter named is none: a planner without tools beside a worker looks the same.
    """
    nodes, lineages = tree.nodes, tree.lineages
    candidates = [
        node
        for node in nodes
        if node.call.program and node.call.agent is None and not node.tools and node.is_one_turn
        if node.before is None and node.after is None and lineages[node.number].kind is LineageKind.MAIN
    ]
    worked = Counter(node.number for node in nodes if node.tools)
    if not candidates or not worked:
        return []
    [(longest, _)] = worked.most_common(1)
    instructions = {node.system for node in nodes if node.number == longest}
    # Calls that go on repeat those before them.
    whole = [node for node in nodes if node.after is None or node.is_one_turn]
    return [
        node
        for node in candidates
        if node.system not in instructions
        and (node.call.requested.max_tokens == 1 or all(len(text) <= _MAX_ASIDE for _, text in node.replies))
        and not any(text and _is_part(text, own) for _, text in node.replies for own in result)
        and (node.quotes(node, 1) or not any(other.quotes(node, 1) for other in whole[whole.index(node) + 1 :]))
    ]


@dataclass(slots=True)
class _Tree:
    nodes: Sequence[_Node]
    """Each goes to its place after those before it."""
    lineages: list[Lineage] = field(default_factory=list)
    _asked: dict[int, list[_Node]] = field(default_factory=dict)
    """By the digest of their messages, the latest first."""
    _answered: dict[int, list[_Node]] = field(default_factory=dict)
    """By the digest of their messages with a reply, the latest first."""
    _delegated: dict[str, tuple[_Node, list[str]]] = field(default_factory=dict)
    """Tool calls that started no lineage yet, by id: the call that asked, and the texts in its arguments."""
    _answered_ids: set[str] = field(default_factory=set)
    """Ids of tool calls with a result."""

    def __post_init__(self) -> None:
        for at, node in enumerate(self.nodes):
            node.turn, node.before, node.after = 0, None, None
            self._place(node, self.nodes[:at][::-1])
            new = node.messages[len(node.before.messages) if node.before else 0 :]
            self._answered_ids.update(str(message.get("tool_call_id")) for message in new)
            for tool_call in (called for choice in node.call.choices for called in tool_calls_of(choice.message)):
                self._delegated[tool_call["id"]] = node, [*_texts_in(function_of(tool_call)[1])]
            self._asked.setdefault(node.prefixes[-1], []).insert(0, node)
            for digest, _ in node.replies:
                self._answered.setdefault(digest, []).insert(0, node)

    def _place(self, node: _Node, earlier: Sequence[_Node]) -> None:
        """Put a call into its lineage, or begin one; `earlier` are those before it, the latest first."""
        if (parent := self._continued(node)) is not None:
            if parent.after is None and node.is_alike(parent):
                return self._go_on(node, parent)
            # Codex keeps the first messages, and has the user tell the summary.
            summary = next((other for other in earlier if node.is_told(other)), None)
            kind = LineageKind.BRANCH if summary is None else LineageKind.COMPACTION
            return self._begin(node, kind, summary or parent)
        if (parent := self._delegating(node)) is not None:
            return self._begin(node, LineageKind.SUB_AGENT, parent)
        for twin in self._asked.get(node.prefixes[-1], ()):
            if node.is_alike(twin) and not (twin.is_one_turn and (twin.after is None or twin.after.is_one_turn)):
                return self._begin(node, LineageKind.BRANCH, twin.before)
        for at, last in enumerate(earlier):
            if last.after is not None or last.call.agent != node.call.agent:
                continue
            if node.is_one_turn and last.is_one_turn and (last.call.agent or last.system == node.system):
                return self._go_on(node, last)
            if node.is_alike(last) and not last.is_one_turn and len(node.texts) <= len(last.texts):
                own = (other for n, other in enumerate(earlier) if n < at or other.number == last.number)
                summary = next((other for other in own if node.quotes(other, _MIN_QUOTE)), None)
                if summary is not None and summary.before is None and summary.number != last.number:
                    self.lineages[summary.number] = Lineage(summary.number, LineageKind.COMPACTION, last.call.id)
                if summary is not None or node.opening == last.opening:
                    return self._begin(node, LineageKind.COMPACTION, summary or last)
        return self._begin(node, LineageKind.MAIN, None)

    def _continued(self, node: _Node) -> _Node | None:
        """The call with most messages that this one continues, or branches from."""
        for known, prefixes in ((self._answered, node.prefixes[1:]), (self._asked, node.prefixes[1:-1])):
            for digest in reversed(prefixes):
                of_agent = [other for other in known.get(digest, ()) if other.call.agent == node.call.agent]
                alike = [other for other in of_agent if node.is_alike(other)]
                if of_agent:
                    return next((other for other in alike if other.after is None), (alike or of_agent)[0])
        return None

    def _delegating(self, node: _Node) -> _Node | None:
        """The call whose tool call started this one, if one did: it waits for it, unless it runs in the background."""
        is_sub_agent = node.call.program is not None and node.call.agent is not None
        for id, (parent, texts) in self._delegated.items():
            is_other = (node.system, node.tools) != (parent.system, parent.tools) or not node.is_alike(parent)
            is_open = is_sub_agent or id not in self._answered_ids
            if is_other and any(
                _is_part(text, node.opening) if is_open else len(text) >= _MIN_QUOTE and node.opening.endswith(text)
                for text in texts
            ):
                del self._delegated[id]
                return parent
        return None

    def _go_on(self, node: _Node, last: _Node) -> None:
        node.number, node.turn, node.before, last.after = last.number, last.turn + 1, last, node

    def _begin(self, node: _Node, kind: LineageKind, parent: _Node | None) -> None:
        node.number = len(self.lineages)
        self.lineages.append(Lineage(node.number, kind, None if parent is None else parent.call.id))


def _texts_in(value: Json) -> Iterator[str]:
    if isinstance(value, str) and value.strip():
        yield value.strip()
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(inner)
