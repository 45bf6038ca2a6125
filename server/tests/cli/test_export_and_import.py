"""`agl export`: each format of a run, read by the tools that it is for; `agl import`: what becomes a run."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow.parquet
import pytest

import agl_core
from agl_core.errors import EpisodesError
from agl_core.testing import episodes as make
from agl_core.types import (
    Call,
    Ending,
    Episode,
    Mode,
    PrefixBreak,
    RecordedRollout,
    Reward,
    RolloutState,
    Run,
    Task,
    TransitionKey,
)
from agl_core.types.forms import to_json
from agl_server.reading.export import Format, export_run
from agl_server.reading.importing import IMPORTED, RecordedFile, import_file
from agl_server.reading.rollouts import RecordedRun, groups_of
from agl_server.training.lineages import episode_of


@pytest.fixture
def trained(run: Any) -> Any:
    """Step 1 has three rollouts, step 2 has two and an evaluation; one rollout is not done."""
    evaluated = run.planned(2, "m7", id="e2", mode=Mode.EVAL_GREEDY, task=Task("t2", "6 * 7", split="eval"))
    done = {"state": RolloutState.DONE, "counted_attempt": 0, "ending": Ending.FINISHED}
    run.put(*run.trained(2, "m0"), *run.trained(2, "m1"), run.planned(2, "m3"))
    run.put(replace(evaluated, **done), *(replace(e, rollout="e2") for e in run.trained(2, "m2")[1:4]))
    metrics = [{"step": step, "kind": "train", "restart": 0, "reward/mean": 0.5} for step in (1, 2)]
    (run.store.parent / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return run


def exported(run: Any, *arguments: str, to: str = "episodes", out: str = "out") -> Any:
    return run.agl("export", "calc", "--to", to, "--out", out, *arguments)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_parquet_has_what_was_recorded_for_pandas_and_datasets(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_server.reading.export._ROW_GROUP", 4)
    assert exported(trained, to="parquet").exit_code == 0

    out = trained.folder / "out"
    tables = {file.stem: pyarrow.parquet.read_table(file).to_pylist() for file in out.iterdir()}
    assert {name: len(rows) for name, rows in tables.items()} == {"transitions": 12, "episodes": 6}
    row = next(r for r in tables["transitions"] if (r["rollout"], r["turn"]) == ("s1-g0-m1", 0))
    assert (row["run"], row["step"], row["agent"], row["split"], row["mode"]) == ("calc", 1, "solver", "train", "train")
    assert json.loads(row["messages"]) == [{"role": "user", "content": "6 * 7"}]
    assert (row["prompt_ids"], row["response_ids"], row["logprobs"]) == ([1, 2, 3], [7, 8], [-0.5, -0.5])
    assert (row["state"], row["finish_reason"]) == (None, "stop")
    assert (row["reward"], row["terminal_reward"], row["credit"], row["weight"]) == (-0.25, 0.0, -0.25, 1.0)
    assert [result["status"] for result in json.loads(row["tool_results"])] == ["error"]
    episode = next(r for r in tables["episodes"] if r["rollout"] == "s1-g0-m1")
    assert [(reward["source"], reward["value"]) for reward in json.loads(episode["rewards"])] == [("right", 0.0)]
    frame = pandas.read_parquet(out / "transitions.parquet")
    loaded = datasets.load_dataset(
        "parquet", data_files=str(out / "transitions.parquet"), cache_dir=str(trained.folder / "cache")
    )
    assert list(frame["rollout"]) == loaded["train"]["rollout"][:]
    assert frame["logprobs"][0].dtype == "float32"


def test_of_one_agent_there_are_its_own_transitions_alone(trained: Any) -> None:
    [first, second] = [e for e in trained.trained(3, "m0") if isinstance(e, Call)]
    others = [record for record in trained.trained(3, "m0") if not isinstance(record, Call)]
    trained.put(*others, replace(first, agent="planner", prompt_ids=None), replace(second, agent="\ud800"))

    output = exported(trained, "--agent", "planner", to="parquet").stdout

    [row] = pyarrow.parquet.read_table(trained.folder / "out" / "transitions.parquet").to_pylist()
    assert (row["rollout"], row["turn"], row["agent"]) == ("s3-g0-m0", 0, "planner")
    assert "1 transitions, 1 episodes" in output
    assert "left out: 1 rollouts that are not done" in output
    exported(trained, "--step", "3", to="parquet", out="whole")
    agents = pandas.read_parquet(trained.folder / "whole" / "transitions.parquet")["agent"]
    assert list(agents) == ["planner", "?"], "what is no UTF-8 is replaced"


def test_sft_has_a_prompt_a_completion_and_tools_for_each_call(trained: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    trained.put(
        *(
            replace(record, request={**record.request, "tools": tools}) if isinstance(record, Call) else record
            for record in trained.trained(3, "m0")
        )
    )

    exported(trained, "--min-reward", "1", "--step", "3", to="sft", out="sft.jsonl")

    first, second = lines(trained.folder / "sft.jsonl")
    assert first["prompt"] == [{"role": "user", "content": "6 * 7"}]
    assert first["completion"][0]["tool_calls"][0]["function"] == {"name": "look", "arguments": {}}
    assert second["completion"] == [{"role": "assistant", "content": "42"}]
    assert json.loads(second["tools"]) == tools


def test_preferences_are_of_replies_to_one_prompt_in_one_group(trained: Any) -> None:
    exported(trained, to="preferences", out="pairs.jsonl")

    pair = {
        "prompt": [{"role": "user", "content": "6 * 7"}],
        "chosen": [{"role": "assistant", "content": "42"}],
        "rejected": [{"role": "assistant", "content": "7"}],
        "tools": None,
    }
    assert lines(trained.folder / "pairs.jsonl") == [pair, pair]


def test_what_is_trained_on_elsewhere_is_not_what_this_run_is_evaluated_on(trained: Any) -> None:
    def count(*arguments: str) -> int:
        name = f"{'-'.join(arguments)}.jsonl"
        exported(trained, *arguments, to="sft", out=name)
        return len(lines(trained.folder / name))

    assert "left out: 1 rollouts that are evaluations" in exported(trained, to="sft").stdout
    trained.put(Run("calc", 1, 1.0, {}, resumed_step=1))
    assert "left out: 2 rollouts that are superseded" in exported(trained, to="parquet", out="tables").stdout
    trained.put(Run("calc", 1, 1.0, {}, resumed_step=2))
    assert count("--split", "eval") == count("--mode", "eval-greedy") == 2
    assert count() == count("--mode", "train") == 10
    assert (count("--verdict", "unhealthy"), count("--max-reward", "0")) == (6, 4)
    caught = trained.folder / "runs" / "caught"
    caught.mkdir()
    (caught / "config.toml").write_text("[capture]\n")
    rollout, *others = trained.trained(1, "m0")
    trained.put(replace(rollout, mode=Mode.EVAL_SAMPLED), *others, to=caught / "store.sqlite")
    trained.agl("export", "caught", "--to", "sft", "--out", "caught.jsonl")
    assert len(lines(trained.folder / "caught.jsonl")) == 2, "of what is no training run, everything"


def test_what_cannot_be_exported_leaves_nothing(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: str, to: str = "parquet", out: str = "out") -> Any:
        before = sorted(path.name for path in trained.folder.iterdir())
        error = exported(trained, *arguments, to=to, out=out).exception
        assert sorted(path.name for path in trained.folder.iterdir()) == before
        return error

    (trained.folder / "taken").write_text("mine")
    assert "taken exists already" in str(refused(out="taken"))
    assert (trained.folder / "taken").read_text() == "mine"
    assert "no folder nowhere" in str(refused(out="nowhere/out"))
    for to in Format:
        assert "6 not what the filters ask for" in str(refused("--split", "nowhere", to=to))
    monkeypatch.setattr("agl_server.reading.export._cell", lambda *_: 1 / 0)
    assert isinstance(refused(), ZeroDivisionError)


# Recorded conversations and exported episodes become runs; bad lines are named, and leave nothing.


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


ASKED = {"role": "user", "content": "2 + 3?"}
SAID, OTHER = ({"role": "assistant", "content": content} for content in "56")


def write(run: Any, *rows: Any) -> str:
    (run.folder / "chats.jsonl").write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
    return "chats.jsonl"


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
    size = (
        "import agl_core\n@agl_core.group_reward_rule\ndef size(episodes):\n    return [len(episodes)] * len(episodes)"
    )
    (run.folder / "sizes.py").write_text(size)
    run.write(
        "try.toml",
        plugins=["trial_rules.py", "sizes.py"],
        rewards={"numeric_match": {"field": "result"}, "size": {"weight": 0}},
    )
    tried = ("reward", "try", "--yes", "try.toml", "--run", "imported", "--rollout", "imported-1", "--json")
    [rollout] = json.loads(run.agl(*tried).stdout)["rollouts"]
    assert {(reward["source"], reward["before"], reward["after"]) for reward in rollout["rewards"]} == {
        ("imported", 1.0, None), ("numeric_match", None, 1.0), ("size", None, 2.0),
    }  # fmt: skip
    assert run.agl("export", "imported", "--to", "preferences", "--out", "pairs.jsonl").exit_code == 0
    [pair] = [json.loads(line) for line in (run.folder / "pairs.jsonl").read_text().splitlines()]
    assert (pair["chosen"][0]["tool_calls"][0]["id"], pair["rejected"][0]["content"]) == ("c1", "7")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "Expecting property name"),
        (1, "must be a JSON object, or a list of messages"),
        ([1], "messages: must be a list of messages"),
        (ASKED, "that of one message"),
        ({"messages": [ASKED, SAID], "label": "spam"}, "'label' is 'spam', which does not say whether"),
        ({"messages": [ASKED, {**SAID, "function_call": {}}]}, "OpenAI's old form of `tool_calls`"),
        ({"input": {"messages": [ASKED]}, "preferred_output": [SAID]}, "OpenAI's form of preferences"),
        ({"contents": [{"role": "user", "parts": []}]}, "Gemini's form"),
        ({"prompt": "2 + 3?", "chosen": "5", "rejected": ""}, "'rejected' is an empty text"),
        ({"rollout": "r", "turn": 1}, "its keys (rollout, turn) are none that are read: messages"),
        ({"text": "2 + 3 = 5"}, "'text' is a text without roles"),
        ({"question": "2 + 3?", "answer": "5"}, "a task and no conversation; train on it with [tasks.train]"),
        ({"question": "2 + 3?"}, "needs the key `input` or the name of another, for instance columns = {"),
        ({"prompt": "2 + 3?", "chosen": "5"}, "no `rejected` beside `chosen`"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no assistant message that follows"),
        ({"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
        ({"messages": [{"role": "user"}, {"role": "assistant"}]}, "neither 'content' nor 'tool_calls'"),
        ({**CONVERSATION, "reward": "good"}, "reward: "),
        ({"transitions": []}, "lacks the field"),
        (make.episode(replace(make.transition(), key=TransitionKey("another", 0, "c", 0))), "has a part of 'another'"),
        (make.episode(unjoined=(make.tool_result("o", rollout="another"),)), "has a part of 'another'"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_imported(run: Any, line: Any, what: str) -> None:
    line = to_json(line) if isinstance(line, Episode) else line
    result = run.agl("import", write(run, CONVERSATION, "", line, CONVERSATION))

    assert isinstance(result.exception, EpisodesError)
    assert "line 3: " in str(result.exception)
    assert what in str(result.exception)
    assert [path.name for path in (run.folder / "runs").iterdir()] == ["calc"]


CALLED = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 3}}'}
SHARED = [ASKED, {"role": "assistant", "content": "Which?"}, {"role": "user", "content": "That."}]
TOLD = [
    {"from": "human", "value": "2 + 3?"},
    CALLED,
    {"from": "observation", "value": "5"},
    {"from": "gpt", "value": "5"},
]


HH = "\n\nHuman: 2 + 3?\n\nAssistant: Which?\n\nHuman: That.\n\nAssistant: {}"


def read(file: Path) -> list[RecordedRollout]:
    """The rollouts of a file, all of one task, as training reads them: like those of the run that is made of it."""
    in_file, in_run = RecordedFile(file), RecordedRun(import_file(file, IMPORTED, file.parent / "read").run)
    [group], [of_run] = groups_of(in_file.rollouts), groups_of(in_run.rollouts)
    read, imported = asyncio.run(in_file.read(group)), asyncio.run(in_run.read(of_run))
    assert in_file.has_preferences == in_run.has_preferences
    for one, other in zip(read, imported, strict=True):
        assert replace(one.rollout, id="", run="") == replace(other.rollout, id="", run="")
        assert one.terminal == other.terminal
        assert [call.request for call in one.calls] == [call.request for call in other.calls]
    return read


@pytest.mark.parametrize(
    ("row", "said", "rewards"),
    [
        ({"conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}]}, ["5"], [None]),
        (
            {"conversations": TOLD, "tools": json.dumps(CONVERSATION["tools"])}, [None, "5"], [None],
        ),
        ({"instruction": "Add.", "input": "2 3", "output": "5"}, ["5"], [None]),
        ({"prompt": "2 + 3?", "completion": "5"}, ["5"], [None]),
        ({"prompt": SHARED, "completion": [SAID], "tools": None}, ["5"], [None]),
        ({"prompt": [ASKED], "completion": [SAID], "label": False}, ["5"], [0.0]),
        ({"messages": [*SHARED, SAID], "label": False}, ["5"], [0.0]),
        ({"instruction": "Add.", "output": "5", "kto_tag": "True"}, ["5"], [1.0]),
        ({"messages": [ASKED, {**SAID, "train": False}, ASKED, {**OTHER, "train": True}]}, ["6"], [None]),
        ({"conversations": [*TOLD[:3], {**TOLD[3], "loss": False}]}, [None], [None]),
        ({"prompt": "2 + 3?", "response": "5"}, ["5"], [None]),
        ({"prompt": "2 + 3?", "chosen": "5", "rejected": "6"}, ["5", "6"], [1.0, 0.0]),
        ({"question": "2 + 3?", "chosen": "5", "rejected": "6"}, ["5", "6"], [1.0, 0.0]),
        ({"instruction": "Add.", "input": "2 3", "chosen": "5", "rejected": "6"}, ["5", "6"], [1.0, 0.0]),
        ({"conversations": TOLD[:1], "chosen": TOLD[3], "rejected": OTHER}, ["5", "6"], [1.0, 0.0]),
        ({"chosen": HH.format(5), "rejected": HH.format(6)}, ["5", "6"], [1.0, 0.0]),
        ({"prompt": HH.format(""), "chosen": "5", "rejected": "6"}, ["5", "6"], [1.0, 0.0]),
        ({"prompt": [ASKED], "chosen": [SAID], "rejected": [OTHER]}, ["5", "6"], [1.0, 0.0]),
        ({"chosen": [*SHARED, SAID], "rejected": [*SHARED, OTHER]}, ["5", "6"], [1.0, 0.0]),
        ({"prompt": "2 + 3?", "chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]}, ["5", "6"], [1.0, 0.0]),
        (
            {"prompt": "2 + 3?", "messages": [ASKED, SAID], "chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]},
            ["5", "6"], [1.0, 0.0],
        ),
    ],
)  # fmt: skip
def test_shapes_that_people_have_are_read(
    tmp_path: Path, row: dict[str, Any], said: list[str | None], rewards: list[float | None]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))

    rollouts = read(file)

    calls = [call for rollout in rollouts for call in rollout.calls]
    assert [rollout.terminal for rollout in rollouts] == rewards
    replies = [call.choices[0].message for call in calls]
    assert [reply.get("content") for reply in replies] == said, "a reply in a shared prompt is no call"
    assert calls[0].request["messages"][-1]["role"] == "user"
    arguments = [call["function"]["arguments"] for reply in replies for call in reply.get("tool_calls") or ()]
    assert [json.loads(text) for text in arguments] == [{"a": 2, "b": 3}] * said.count(None)
    for name in ("system", "system_prompt"):
        file.write_text(json.dumps({**row, name: "Be brief."}))
        for call in (call for rollout in read(file) for call in rollout.calls):
            roles = [message["role"] for message in call.request["messages"]]
            assert (roles[0], roles.count("system"), "weight" in str(call.request)) == ("system", 1, False)


def test_each_kind_of_file_has_the_same_rows(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "2 3", "output": "5"}
    saved = datasets.Dataset.from_list([row])
    (tmp_path / "array.json").write_text(json.dumps([row], indent=1))
    (tmp_path / "line.json").write_text("\ufeff" + json.dumps([row]))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    (tmp_path / "pretty.json").write_text(json.dumps(row, indent=1))
    (tmp_path / "lists.json").write_text(json.dumps([[{"role": "user", "content": "Add.\n\n2 3"}, SAID]]))
    for name, comma in (("rows.csv", ","), ("rows.CSV", ","), ("rows.tsv", "\t")):
        lines = ("instruction", "input", "output", "note"), ("Add.", '"2 3"', "5", "x" * 200_000)
        (tmp_path / name).write_text("".join(comma.join(line) + "\n" for line in lines))
    for name in ("rows.parquet", "rows.PARQUET", "rows.pq"):
        saved.to_parquet(str(tmp_path / name))
    saved.save_to_disk(tmp_path / "saved")
    (tmp_path / "rows.arrow").write_bytes(next((tmp_path / "saved").glob("*.arrow")).read_bytes())
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "splits")

    for file in sorted(tmp_path.iterdir()):
        [rollout] = read(file)
        assert rollout.calls[0].request["messages"] == [{"role": "user", "content": "Add.\n\n2 3"}], file
        assert rollout.rollout.task.split == ("train" if file.name == "splits" else "imported")
    for name, broken in (("b.parquet", b"PAR1"), ("b.gz", b"\x1f\x8b"), ("b.csv", b'a,b\n"x')):
        (tmp_path / name).write_bytes(broken)
        with pytest.raises(EpisodesError, match=f"{name} (cannot be read|has bad rows)"):
            read(tmp_path / name)
    utf16 = json.dumps(row).encode("utf-16")
    for data, kind in ((bz2.compress(b"{}"), "bzip2"), (b"\x28\xb5\x2f\xfd0", "zstd"), (utf16, "UTF-16")):
        (tmp_path / "c").write_bytes(data)
        with pytest.raises(EpisodesError, match=f"c is {kind}; "):
            read(tmp_path / "c")


def test_what_is_no_file_of_conversations(run: Any) -> None:
    assert "has no row" in str(run.agl("import", write(run)).exception)
    output = str(run.agl("import", write(run, *["{"] * 50)).exception)
    assert ("line 20: " in output, "and 30 more" in output) == (True, True)
    assert "is that of line 1 too" in str(run.agl("import", write(run, *[to_json(make.episode())] * 2)).exception)
    for no_file in ("nowhere.jsonl", "weights"):
        assert "is no file" in str(run.agl("import", no_file).exception)
    (run.folder / "binary").write_bytes(bytes(range(256)))
    assert "line 2: byte 118 of the line is 0x80, which is not UTF-8" in str(run.agl("import", "binary").exception)
    assert "cannot be a folder's name" in str(run.agl("import", "binary", "--name", "../runs/up").exception)
    assert [path.name for path in (run.folder / "runs").iterdir()] == ["calc"]


def test_an_exported_run_comes_back_with_its_rewards(run: Any) -> None:
    run.put(agl_core.types.Run("calc", 0, 0.0, {"rewards": {"right": {"weight": 0.5}, "tools": {"weight": 1.0}}}))
    run.agl("export", "calc", "--to", "episodes", "--out", "out")

    assert run.agl("import", "out", "--name", "again").exit_code == 0

    before, after = (json.loads(run.agl("rollouts", name, "--json").stdout) for name in ("calc", "again"))
    for one, other in zip(before, after, strict=True):
        rest = [{**reward, "name": "rest", "source": "imported", "value": -0.5 * reward["value"]}
                for reward in one["rewards"] if reward["source"] == "right" and reward["value"]]  # fmt: skip
        assert sorted(map(str, other["rewards"])) == sorted(map(str, [*one["rewards"], *rest])), "its weight was 0.5"


def test_what_the_agent_reported_of_a_call_is_exported_and_is_no_reward_of_the_call(run: Any) -> None:
    said = Reward("s1-g0-m0", 0, "effort", 0.125, "agent", call="s1-g0-m0-c0")
    run.put(said)
    for form in ("parquet", "episodes"):
        run.agl("export", "calc", "--to", form, "--out", form)

    rows = pyarrow.parquet.read_table(run.folder / "parquet" / "transitions.parquet").to_pylist()
    [row] = [r for r in rows if (r["rollout"], r["turn"]) == ("s1-g0-m0", 0)]
    assert ([r["name"] for r in json.loads(row["rewards"])], row["reward"]) == (["look", "effort"], 0.25)
    [episode] = [e for e in agl_core.load_episodes(run.folder / "episodes") if e.rollout == "s1-g0-m0"]
    assert said in episode.rewards, "where the next run's rule finds it"
    assert [t.reward for t in episode.transitions] == [0.25, 0.0]


def test_export_then_import_gives_the_same_episodes(tmp_path: Path) -> None:
    """They have several agents, choices of a call, tools by id and by span, rewards of calls and at the end."""
    broken = make.choice(0, ["t0"], 5, mask=np.ones(5, np.bool_), parse_error="no brace")
    calls = [
        make.call(0, broken, make.choice(1), agent="a", state={"n": 1}, parent_span="s1"),
        make.call(1, make.choice(tokens=0), agent="b", prefix_broken=PrefixBreak.EDITED, version=None),
        make.call(2, request={"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}),
        make.call(3, prompt_ids=None),
    ]
    tool_results = [make.tool_result("o1", "t0", result="4"), make.tool_result("o2", parent_span="s1")]
    recorded = RecordedRollout(make.rollout(step=2), make.attempt(result="4"), calls, tool_results, ())
    built = episode_of(recorded)
    transitions = tuple(
        replace(t, rewards=(Reward("r", 0, "of_call", n / 8, "rule", t.key.call, t.key.choice),) if n % 2 else ())
        for n, t in enumerate(built.transitions)
    )
    episode = replace(built, transitions=transitions, rewards=(Reward("r", 0, "right", 0.1, "rule"),), terminal=0.1)
    agl_core.save_episodes(tmp_path / "first.jsonl", [episode])

    imported = import_file(tmp_path / "first.jsonl", "one", tmp_path)
    asyncio.run(export_run(imported.run, Format.EPISODES, tmp_path / "out"))

    assert [to_json(again) for again in agl_core.load_episodes(tmp_path / "out")] == [to_json(episode)]
