"""A policy learns from recorded conversations: by their rewards, and by imitation of a file of demonstrations."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

CALC = Path(__file__).parents[2] / "examples" / "calc"
CONFIGURATION = """
config_version = 1
name = "learned"
folder = "{calc}"                 # Tasks and agent are those of the example.
plugins = ["tasks.py"]

[tasks.train]
source = "recorded"
run = "{recorded}"
without_logprobs = true

[tasks.eval]
source = "calc"
split = "eval"

[policies.default.model]
path = "{calc}/policy"
dtype = "float32"

[sampling]
max_tokens = 64

[train]
steps = 40

[eval]
every = 40
tasks = 40

[algorithm]
name = "reinforce++"
"reinforce++" = {{ whitening = "off" }}

[agent]
entry = "agent:solve"

[rewards.answer]
rule = "numeric_match"
field = "result"
"""


@pytest.fixture
def conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of each problem one that solves it, and two that do not, as another program might have recorded them."""
    monkeypatch.syspath_prepend(str(CALC))
    from make_calc import TOOLS, Behaviour, behave
    from problems import Split, problem

    file = tmp_path / "chats.jsonl"
    with file.open("w") as lines:
        for index in range(200):
            sum_ = problem(Split.TRAIN, 7, index)
            for behaviour, reward in ((Behaviour.SOLVE, 1), (Behaviour.GUESS, 0), (Behaviour.IGNORE_RESULT, 0)):
                conversation = {"messages": behave(behaviour, sum_), "tools": TOOLS, "result": sum_.result}
                lines.write(json.dumps({"id": str(index), "reward": reward, **conversation}) + "\n")
    for name in ("make_calc", "problems", "calculator"):
        sys.modules.pop(name, None)  # Other examples have modules of these names.
    return file


@pytest.mark.storm
@pytest.mark.timeout(900)
def test_a_policy_learns_from_recorded_conversations(agl: Any, conversations: Path) -> None:
    assert "600 rollouts, 1000 calls" in agl.run("import", conversations, "--name", "chats")
    file = agl.folder / "train.toml"
    file.write_text(CONFIGURATION.format(calc=CALC, recorded=agl.folder / "runs" / "chats"))

    agl.run("train", file)

    reward = agl.summary("learned")["reward"]
    assert reward["before"]["greedy"] < 0.2
    assert reward["after"]["greedy"] > 0.8
    assert reward["after"]["sampled"] > 0.5
    steps = [line for line in agl.metrics("learned") if line["kind"] == "train"]
    assert all(line["transitions/without_logprobs"] > 0 for line in steps)
    assert all(line["update/transitions_trained"] >= 32 for line in steps), "both calls of 16 that solve a problem"
    shown = agl.run("show", agl.folder / "runs" / "learned", "s1-g0-m0")
    assert "tokens, no log-probabilities" in shown


@pytest.mark.storm
@pytest.mark.timeout(300)
def test_a_policy_imitates_the_trained_agent_of_a_file(agl: Any, conversations: Path) -> None:
    """The rules of the configuration are not asked, and no agent runs: what is held out is recorded too."""
    good = [chat for line in conversations.read_text().splitlines() if (chat := json.loads(line)).pop("reward") == 1]
    for number, chat in enumerate(good):
        chat["split"] = "held" if number < 20 else "train"
        solving, answer = (message for message in chat["messages"] if message["role"] == "assistant")
        solving["name"], answer["name"] = "solver", "writer"
    demonstrations = conversations.with_name("demonstrations.jsonl")
    demonstrations.write_text("".join(json.dumps(chat) + "\n" for chat in good))
    file = agl.folder / "train.toml"
    file.write_text(CONFIGURATION.format(calc=CALC, recorded="none"))
    held_out = f"tasks.eval={{source='recorded', run='{demonstrations}', split='held'}}"
    settings = ("algorithm.name=sft", held_out, "train.agents=['solver']", "train.steps=6", "tasks.train.split=train")

    said = agl.run("train", file, "--from", demonstrations, *(f"--set={setting}" for setting in settings))

    assert "verdict: learned: the held-out loss (eval) fell from" in said
    assert "alarm" not in said
    trained = agl.summary("learned")["trained_tokens"]
    assert trained["exact_share"] is None
    assert re.search(f"^tokens +{trained['count']} trained on$", said, re.MULTILINE), "nothing was sampled: no proof"
    first, *steps, last = agl.metrics("learned")
    assert last["eval/loss"] < first["eval/loss"] / 2
    assert last["eval/accuracy"] > first["eval/accuracy"]
    assert agl.summary("learned")["reward"]["after"] == {"loss": last["eval/loss"], "accuracy": last["eval/accuracy"]}
    for line in steps:
        assert line["transitions/kept"] == line["dropped/untrained_agent"] == 16
        assert not [key for key in line if key.startswith(("reward/", "groups/no_contrast", "alarm/"))]


@pytest.mark.storm
@pytest.mark.timeout(300)
def test_preferences_of_a_file_are_learned_as_they_are_though_rules_would_score_them(
    agl: Any, conversations: Path
) -> None:
    """No switch is needed: DPO asks for no log-probabilities of sampling, and no rule scores what was compared."""
    by_task: dict[str, list[Any]] = {}
    for chat in map(json.loads, conversations.read_text().splitlines()):
        by_task.setdefault(chat["id"], []).append(chat)
    pairs = conversations.with_name("pairs.jsonl")
    with pairs.open("w") as lines:
        for good, bad, _ in by_task.values():  # The wrong one is preferred, so that a rule would turn them round.
            row = {"chosen": bad["messages"], "rejected": good["messages"], "tools": good["tools"]}
            lines.write(json.dumps(row) + "\n")
    file = agl.folder / "train.toml"
    file.write_text(CONFIGURATION.format(calc=CALC, recorded="none"))
    settings = ("algorithm={name='dpo'}", "train.steps=8", "eval.every=0")

    said = agl.run("train", file, "--from", pairs, *(f"--set={setting}" for setting in settings))

    assert re.search(r"step +8/8  pair accuracy [01]\.\d+", said)
    assert re.search(r"verdict: learned: in (9\d|100)% of the last \d+ pairs training favoured the better one", said)
    assert not any(key.startswith("reward/") for line in agl.metrics("learned") for key in line)
