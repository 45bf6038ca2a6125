"""`agl import`: recorded conversations and exported episodes become runs; bad lines are named, and leave nothing."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agl_core
from agl_core.errors import EpisodesError
from agl_core.learning.transitions import build_episode
from agl_core.reading.export import Format, export_run
from agl_core.reading.importing import import_file
from agl_core.testing import episodes as make
from agl_core.types import Episode, PrefixBreak, Reward, ToolResult, TransitionKey
from agl_core.types.forms import to_json

ADD = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
CONVERSATION = {
    "id": "sum",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": None, "tool_calls": [ADD]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ],
    "tools": [{"type": "function", "function": {"name": "add"}}],
    "result": "5",
    "reward": 1,
}


def write(run: Any, *rows: Any) -> str:
    (run.folder / "chats.jsonl").write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
    return "chats.jsonl"


def runs(run: Any) -> set[str]:
    return {path.name for path in (run.folder / "runs").iterdir()}


def test_a_conversation_is_a_rollout_and_each_reply_a_call(run: Any) -> None:
    worse = {**CONVERSATION, "messages": [*CONVERSATION["messages"][:2], {"role": "assistant", "content": "7"}]}

    output = run.agl("import", write(run, CONVERSATION, {**worse, "reward": 0.0})).stdout

    assert "imported: 2 rollouts, 3 calls" in output
    given = [message | ({"weight": 0} if at == 2 else {}) for at, message in enumerate(CONVERSATION["messages"])]
    output = run.agl("import", write(run, {**CONVERSATION, "messages": given})).stdout
    assert "imported-2: 1 rollouts, 1 calls" in output, "a message of no weight is no call"
    [first, second] = json.loads(run.agl("rollouts", "imported", "--json").stdout)
    assert (first["task"]["input"], first["task"]["metadata"]) == ("2 + 3?", {"result": "5"})
    assert (first["group"], second["group"], second["member"]) == ("sum", "sum", 1)
    shown = json.loads(run.agl("show", "imported", "imported-1", "--json").stdout)
    [one, two] = shown["attempts"][0]["episode"]["transitions"]
    assert [result["tool"] for result in one["tool_results"]] == ["add"]
    assert len(two["messages"]) == 4
    run.write("try.toml", rewards={"numeric_match": {"field": "result"}})
    tried = ("reward", "try", "--yes", "try.toml", "--run", "imported", "--rollout", "imported-1", "--json")
    [rollout] = json.loads(run.agl(*tried).stdout)["rollouts"]
    assert {(reward["source"], reward["before"], reward["after"]) for reward in rollout["rewards"]} == {
        ("imported", 1.0, None), ("numeric_match", None, 1.0),
    }  # fmt: skip
    assert run.agl("export", "imported", "--to", "preferences", "--out", "pairs.jsonl").exit_code == 0
    [pair] = [json.loads(line) for line in (run.folder / "pairs.jsonl").read_text().splitlines()]
    assert (pair["chosen"][0]["tool_calls"][0]["id"], pair["rejected"][0]["content"]) == ("c1", "7")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "Expecting property name"),
        ([1], "must be a JSON object"),
        ({"rollout": "r", "turn": 1}, "messages: Field required"),
        ({"messages": []}, "no assistant message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no assistant message that follows"),
        ({"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
        ({"messages": [{"role": "user"}, {"role": "assistant"}]}, "neither 'content' nor 'tool_calls'"),
        ({"messages": [{"role": "user"}, {"role": "assistant", "tool_calls": "x"}]}, "messages.1.tool_calls: "),
        ({**CONVERSATION, "reward": "good"}, "reward: "),
        ({**CONVERSATION, "reward": 10**400}, "reward: "),
        ({**CONVERSATION, "tools": "x"}, "tools: "),
        ({**CONVERSATION, "id": [1]}, "id"),
        ({"transitions": []}, "lacks the field"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_imported(run: Any, line: Any, what: str) -> None:
    result = run.agl("import", write(run, CONVERSATION, "", line, CONVERSATION))

    assert isinstance(result.exception, EpisodesError)
    assert "line 3: " in str(result.exception)
    assert what in str(result.exception)
    assert runs(run) == {"calc"}


def test_what_is_no_file_of_conversations(run: Any) -> None:
    assert "has no line" in str(run.agl("import", write(run)).exception)
    output = str(run.agl("import", write(run, *["{"] * 50)).exception)
    assert ("line 20: " in output, "and 30 more" in output) == (True, True)
    for no_file in ("nowhere.jsonl", "weights"):
        assert "is no file" in str(run.agl("import", no_file).exception)
    (run.folder / "binary").write_bytes(bytes(range(256)))
    assert "line 1: " in str(run.agl("import", "binary").exception)
    assert runs(run) == {"calc"}


def test_an_exported_run_comes_back_with_its_rewards(run: Any) -> None:
    run.put(agl_core.types.Run("calc", 0, 0.0, {"rewards": {"right": {"weight": 0.5}, "tools": {"weight": 1.0}}}))
    run.agl("export", "calc", "--to", "episodes", "--out", "out")

    assert run.agl("import", "out", "--name", "again").exit_code == 0

    before, after = (json.loads(run.agl("rollouts", name, "--json").stdout) for name in ("calc", "again"))
    for one, other in zip(before, after, strict=True):
        rest = [{**reward, "name": "rest", "source": "imported", "value": -0.5 * reward["value"]}
                for reward in one["rewards"] if reward["source"] == "right" and reward["value"]]  # fmt: skip
        assert sorted(map(str, other["rewards"])) == sorted(map(str, [*one["rewards"], *rest])), "its weight was 0.5"
    run.agl("export", "again", "--to", "episodes", "--out", "twice")
    run.agl("import", "twice", "--name", "twice")
    run.agl("export", "twice", "--to", "episodes", "--out", "thrice")
    assert (run.folder / "twice").read_text() == (run.folder / "thrice").read_text()


text = st.text(max_size=8)
logprobs = st.floats(-20, 0, width=32)


@st.composite
def any_episodes(draw: st.DrawFn) -> Episode:
    """Several agents, several choices of a call, tools by id and by span, rewards of calls and at the end."""
    rollout, calls, tool_results = f"r{draw(st.integers(0, 10**6))}", [], []
    for sequence in range(draw(st.integers(0, 4))):
        choices = []
        for index in range(draw(st.integers(1, 2))):
            tokens = draw(st.integers(0, 5))
            ids = [f"t{sequence}-{index}"] if draw(st.booleans()) else []
            choices.append(
                make.choice(
                    index,
                    ids,
                    tokens,
                    logprobs=np.array(draw(st.lists(logprobs, min_size=tokens, max_size=tokens)), np.float32),
                    mask=draw(st.sampled_from([None, np.ones(tokens, np.bool_)])),
                    parse_error=draw(st.none() | text),
                )
            )
            tool_results += [make.tool_result(f"o-{id}", id, rollout=rollout, result=draw(text)) for id in ids]
        span = draw(st.sampled_from([None, "s1"]))
        if span is not None and draw(st.booleans()):
            tool_results.append(make.tool_result(f"o{sequence}", rollout=rollout, parent_span=span))
        messages = [{"role": "user", "content": draw(text)}]
        calls.append(
            make.call(
                sequence,
                *choices,
                rollout=rollout,
                agent=draw(st.sampled_from([None, "a", "b"])),
                parent_span=span,
                request={"messages": messages, **({"tools": [{"type": "function"}]} if draw(st.booleans()) else {})},
                prompt_ids=draw(st.none() | st.just(np.arange(3, dtype=np.int32))),
                version=draw(st.none() | st.integers(0, 9)),
                state=draw(st.none() | st.dictionaries(text, st.integers())),
                prefix_broken=draw(st.none() | st.sampled_from(PrefixBreak)),
            )
        )
    built = build_episode(
        make.rollout(rollout, step=draw(st.integers(0, 3)), group=draw(st.sampled_from(["g1", "g2"]))),
        make.attempt(rollout, result=draw(st.none() | text)),
        calls,
        tool_results,
    )
    transitions = tuple(
        replace(t, rewards=(Reward(rollout, 0, "of_call", draw(st.floats(-1, 1)), "rule", t.key.call, t.key.choice),))
        if draw(st.booleans())
        else t
        for t in built.transitions
    )
    value = draw(st.floats(-9, 9))
    return replace(
        built, transitions=transitions, rewards=(Reward(rollout, 0, "right", value, "rule"),), terminal=value
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(any_episodes(), min_size=1, max_size=4, unique_by=lambda episode: episode.rollout))
def test_export_then_import_gives_the_same_episodes(tmp_path_factory: Any, episodes: list[Episode]) -> None:
    folder: Path = tmp_path_factory.mktemp("round")
    agl_core.save_episodes(folder / "first.jsonl", episodes)

    imported = import_file(folder / "first.jsonl", "one", folder)
    asyncio.run(export_run(imported.run, Format.EPISODES, folder / "out"))
    result = {episode.rollout: to_json(episode) for episode in agl_core.load_episodes(folder / "out")}
    assert result == {episode.rollout: to_json(episode) for episode in episodes}


def test_an_episode_with_a_part_of_another_is_refused(run: Any) -> None:
    strange = make.episode(replace(make.transition(), key=TransitionKey("another", 0, "c", 0)))
    results: tuple[ToolResult, ...] = (make.tool_result("o", rollout="another"),)
    for episode in (strange, replace(make.episode(), unjoined=results)):
        result = run.agl("import", write(run, to_json(episode)))
        assert "has a part of 'another'" in str(result.exception)
    assert "is that of line 1 too" in str(run.agl("import", write(run, *[to_json(make.episode())] * 2)).exception)
