"""The cost of training conversations of many turns: a row for each call, and a row for calls that continue each other.

    python -m tests.benchmarks.turns --write

In the environment of `make test-verl` (a quarter of an hour, on a quiet machine). Prompts have 200 tokens, observations
60, replies 40. Times are CPU seconds of one thread, the better of two, for what veRL's workers do in one update of
GRPO, on the weights of examples/calc/policy (0.85M parameters): train once, and where it says so score before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agl_algorithms.prepared import lineages
from agl_core.testing.engines import Row, batch_of
from agl_core.types import Batch
from algorithms.verl.tests.parity import POLICY, VOCABULARY
from algorithms.verl.tests.verl_bench import VerlBench

from .tables import table, write

TURNS = (5, 10, 20, 40)
PROMPT, OBSERVATION, REPLY = 200, 60, 40
GROUPS, MEMBERS = 1, 4
GRPO: dict[str, Any] = {"beta": 0.0}
LONGEST = PROMPT + max(TURNS) * (REPLY + OBSERVATION)
"""Of a row, and of a pass of veRL's."""


class History(StrEnum):
    """How an agent sends its conversation with each call."""

    GROWS = "grow"
    SUB_AGENT = "grow; every fourth call is of a sub-agent with a conversation of its own"
    SUMMARY = "are replaced by a summary of 60 tokens every tenth call"
    SHORTENED = "lose the first half of each reply, as where a template drops the thinking"


def calls(random: np.random.Generator, prompt: NDArray[np.int32], turns: int, history: History) -> Iterator[Row]:
    """The calls of one rollout, with any tokens."""

    def some(count: int) -> NDArray[np.int32]:
        return random.integers(0, VOCABULARY, count).astype(np.int32)

    value = float(random.normal())
    conversations = {False: prompt, True: some(PROMPT)}
    for turn in range(turns):
        is_sub_agents = history is History.SUB_AGENT and turn % 4 == 3
        sent = conversations[is_sub_agents]
        if history is History.SUMMARY and turn and turn % 10 == 0:
            sent = np.concatenate([prompt, some(OBSERVATION)])
        reply = some(REPLY)
        yield Row(sent, reply, [-np.log(VOCABULARY)] * REPLY, value)
        kept = reply[REPLY // 2 :] if history is History.SHORTENED else reply
        conversations[is_sub_agents] = np.concatenate([sent, kept, some(OBSERVATION)])


def batch_by_call(turns: int, history: History) -> Batch:
    """Groups of rollouts that begin with the same prompt."""
    random = np.random.default_rng(0)
    rows: list[Row] = []
    for _ in range(GROUPS):
        prompt = random.integers(0, VOCABULARY, PROMPT).astype(np.int32)
        rows += [row for _ in range(MEMBERS) for row in calls(random, prompt, turns, history)]
    rollouts = GROUPS * MEMBERS
    return replace(
        batch_of(rows),
        step=1,
        rollout_N=np.repeat(np.arange(rollouts), turns),
        group_N=np.repeat(np.arange(rollouts) // MEMBERS, turns),
        turn_N=np.tile(np.arange(turns), rollouts),
    )


def as_one_sequence(batch: Batch) -> Batch:
    """Histories that grow, each as one call whose observations are masked."""
    lasts = [chain[-1] for chain in lineages(batch, np.arange(len(batch)))]
    rows = []
    for i in sorted(lasts):
        tokens = batch.tokens_T[batch.offsets[i] : batch.offsets[i + 1]]
        logprobs = [-np.log(VOCABULARY)] * (len(tokens) - PROMPT)
        rows.append(Row(tokens[:PROMPT], tokens[PROMPT:], logprobs, float(batch.values_N[i])))
    sampled = np.arange(len(rows[0].response)) % (REPLY + OBSERVATION) < REPLY
    return replace(batch_of(rows), step=1, mask_R=np.tile(sampled, len(rows)), group_N=np.arange(len(rows)) // MEMBERS)


def tokens(batch: Batch, *, by_call: bool) -> int:
    """How many tokens all rows have together."""
    lengths_N = np.diff(batch.offsets)
    return int(lengths_N.sum() if by_call else sum(lengths_N[c[-1]] for c in lineages(batch, np.arange(len(batch)))))


def seconds(update: Callable[[], object]) -> float:
    """Of CPU time, the better of two."""
    taken = []
    for _ in range(2):
        started = time.process_time()
        update()
        taken.append(time.process_time() - started)
    return min(taken)


def seconds_of_verl(batch: Batch, *, joins_calls: bool, scores_first: bool = False) -> float:
    bench = VerlBench(POLICY, "grpo", GRPO, joins_calls=joins_calls, scores_first=scores_first, longest=LONGEST)
    return seconds(lambda: bench.update(batch, VOCABULARY, 0))


def verl_row(turns: int) -> str:
    batch = batch_by_call(turns, History.GROWS)
    whole = as_one_sequence(batch)
    one, rollouts = tokens(whole, by_call=True), len(whole)
    by_call, by_lineage = (tokens(batch, by_call=by_call) / one for by_call in (True, False))
    times = [
        seconds_of_verl(batch, joins_calls=False),
        seconds_of_verl(batch, joins_calls=True),
        seconds_of_verl(batch, joins_calls=True, scores_first=True),
        seconds_of_verl(whole, joins_calls=False),
    ]
    return f"{turns} | {one // rollouts:,} | {by_call:.1f} | {by_lineage:.2f} | " + " | ".join(
        f"{t:.1f}" for t in times
    )


def history_row(history: History) -> str:
    batch = batch_by_call(20, history)
    rows = len(lineages(batch, np.arange(len(batch)))) / (GROUPS * MEMBERS)
    ratio = tokens(batch, by_call=False) / tokens(batch, by_call=True)
    return f"{history} | 20 | {rows:g} | {ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/verl-parity.md")
    torch.set_num_threads(1)
    arguments = parser.parse_args()
    verl = table(
        "turns | tokens of one sequence | times that by call | by lineage | "
        "CPU s by call | by lineage | scored first | one sequence",
        map(verl_row, TURNS),
    )
    histories = table(
        "histories | rows by call | rows by lineage | tokens, by lineage / by call", map(history_row, History)
    )
    for number, text in enumerate((verl, histories), 1):
        print(text, end="\n\n")
        if arguments.write:
            write("verl-parity.md", f"turns.py, table {number}", text)


if __name__ == "__main__":
    main()
