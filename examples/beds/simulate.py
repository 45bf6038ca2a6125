"""Trains the player of a bed in this process: agl's engine, credit, batches and algorithms, without server and workers.

It makes the same games, transitions and updates as `agl train` on `train.toml`, in about a tenth of the time, so that
rules of credit can be compared over many seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from bed_plugin import draw
from beds import LETTERS, Outcome, Policy, State, Worth, letter, outcomes

from agl_chat.backends import Request, SampledToken
from agl_core import CreditKind, kinds
from agl_core.config.sections import OptimizerSection
from agl_core.learning.batch import BatchPlan, PolicyCredit, make_batches
from agl_core.plugins import Plugins
from agl_core.protocols import PolicySpec
from agl_core.testing import episodes as make
from agl_core.types import Episode, Tokens, ToolResult, ToolStatus, Transition, TransitionKey
from agl_server.engines.child import build_algorithm
from agl_torch.loading import load_model
from agl_torch.sampler import Sampler
from agl_torch.trainer import PolicyTrainer

GROUPS, GROUP_SIZE = 6, 8
"""Games of a step, and rollouts of each."""
ORACLE = "oracle"
"""The true advantage of each call under the policy that made it, scaled to a mean square of 1 in each step."""

Cell = Mapping[str, Any]
"""A game's settings, as `[tasks.train]` has them."""


@dataclass(frozen=True)
class Arm:
    """A way to learn."""

    credit: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str = "grpo"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    """Games of a kind. Their states are `State`, or whatever else has a prompt and a turn."""

    policy: Path
    draw: Callable[..., Any]
    """A game by chance, from a cell's settings."""
    first: Callable[[Any], Any]
    turn: Callable[[Any, str, np.random.Generator], Outcome]
    """The outcome of a letter in a state."""
    held_out: Cell = field(default_factory=dict)
    """The settings in which the games of an evaluation are others."""


def turn(state: State, letter: str, rng: np.random.Generator) -> Outcome:
    possible = outcomes(state, letter)
    return possible[rng.choice(len(possible), p=[each.chance for each in possible])]


BEDS = Rules(Path(__file__).with_name("policy"), draw, State.first, turn)


class Simulation:
    """A policy that plays and learns."""

    def __init__(self, arm: Arm, seed: int, learning_rate: float, rules: Rules = BEDS) -> None:
        torch.manual_seed(seed)
        plugins = Plugins.load()
        spec = PolicySpec(str(rules.policy), "float32", optimizer=OptimizerSection(learning_rate=learning_rate))
        self._rules = rules
        load = partial(load_model, spec, torch.device("cpu"), seed)
        self._loaded, self._rng = load(), np.random.default_rng(seed)
        self._sampler = Sampler(self._loaded, cache_bytes=1 << 26)
        self._trainer = PolicyTrainer(
            self._loaded, spec.optimizer, tokens_per_micro_batch=1 << 15, seed=seed, initial=load
        )
        self._algorithm = build_algorithm(plugins, arm.algorithm, arm.options)
        self._prompts = cache(self._encode)
        self._letters = cache(self._decode)
        self._made: dict[TransitionKey, tuple[State, str]] = {}
        """The state and the letter of each transition of a step."""
        self._plan = BatchPlan({"default": self._credit(plugins, arm)}, min_group_size=2)
        self._step = 0

    def _credit(self, plugins: Plugins, arm: Arm) -> PolicyCredit:
        if arm.credit == ORACLE:
            return PolicyCredit(ORACLE, self._true_credit, CreditKind.ADVANTAGE)
        component = plugins.component(kinds.CREDIT, arm.credit, "credit")
        options = component.options(**arm.settings)
        yields = component.yields(options) if callable(component.yields) else component.yields
        owns_time = arm.options.get("across_calls", False)
        kind = yields if isinstance(yields, CreditKind) else CreditKind.REWARD if owns_time else CreditKind.RETURN
        return PolicyCredit(arm.credit, component.build(options), kind)

    def learn(self, games: Sequence[Any]) -> list[Episode]:
        """A step of training on a group of each game; the episodes that it learned from."""
        episodes = self.play([game for game in games for _ in range(GROUP_SIZE)])
        groups = [episodes[i : i + GROUP_SIZE] for i in range(0, len(episodes), GROUP_SIZE)]
        self._step += 1
        self._worth = Worth(self.shares_by_prompt())
        batches = make_batches(groups, self._plan, step=self._step).batches
        if "default" in batches:
            self._sampler.release()
            self._trainer.update(batches["default"], self._algorithm)
            self._sampler.new_version(self._trainer.version)
        return episodes

    def play(self, games: Sequence[Any]) -> list[Episode]:
        """A rollout of each game, all at the same time."""
        states = [self._rules.first(game) for game in games]
        transitions, rewards = [list[Transition]() for _ in games], [0.0] * len(games)
        self._made = {}
        while playing := [(i, state) for i, state in enumerate(states) if state is not None]:
            prompts = [self._prompts(state.prompt) for _, state in playing]
            for (i, state), token, ids in zip(playing, self._replies(prompts), prompts, strict=True):
                said = self._letters(token.id)
                outcome = self._rules.turn(state, said, self._rng)
                transitions[i].append(_transition(f"r{i}", state, outcome, ids, token))
                self._made[transitions[i][-1].key] = state, said
                states[i], rewards[i] = outcome.after, outcome.reward
        return [
            make.episode(*played, rollout=f"r{i}", group=str(i // GROUP_SIZE), member=i % GROUP_SIZE, terminal=reward)
            for i, (played, reward) in enumerate(zip(transitions, rewards, strict=True))
        ]

    def _replies(self, prompts: Sequence[Tokens]) -> list[SampledToken]:
        seeds = self._rng.integers(2**62, size=len(prompts)).tolist()
        for i, (ids, seed) in enumerate(zip(prompts, seeds, strict=True)):
            self._sampler.submit(Request(str(i), ids, 1, seed=seed))
        tokens: dict[str, SampledToken] = {}
        while not self._sampler.idle:
            tokens |= {g.request.id: g.responses[0].tokens[0] for g in self._sampler.step()}
        return [tokens[str(i)] for i in range(len(prompts))]

    def shares_by_prompt(self) -> Policy:
        """How often the policy gives each letter now; what is none of them is the letter ""."""
        known = cache(self._shares)
        return lambda state: known(state.prompt)

    @torch.inference_mode()
    def _shares(self, prompt: str) -> Mapping[str, float]:
        logits = self._loaded.model(torch.from_numpy(self._prompts(prompt)).long()[None]).logits[0, -1]
        shares = dict.fromkeys(["", *LETTERS], 0.0)
        for token, share in enumerate(logits.softmax(-1).tolist()):
            said = self._letters(token)
            shares[said if said in shares else ""] += share
        return shares

    def _true_credit(self, group: Sequence[Episode]) -> list[list[float]]:
        values = [[self._worth.advantage(*self._made[t.key]) for t in episode.transitions] for episode in group]
        size = fmean(value**2 for of_episode in values for value in of_episode) ** 0.5
        return [[value / size if size else 0.0 for value in of_episode] for of_episode in values]

    def _encode(self, text: str) -> Tokens:
        messages = [{"role": "user", "content": text}]
        rendered = self._loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return np.array(self._loaded.tokenizer(rendered)["input_ids"], np.int32)

    def _decode(self, token: int) -> str:
        return letter(self._loaded.tokenizer.decode([token]))


def _transition(name: str, state: State, outcome: Outcome, prompt_ids: Tokens, token: SampledToken) -> Transition:
    results = []
    if outcome.tool is not None:
        status = ToolStatus.OK if outcome.works else ToolStatus.ERROR
        results.append(ToolResult(str(state.turn), name, 0, outcome.tool, status))
    return make.transition(
        state.turn,
        *results,
        rollout=name,
        prompt_ids=prompt_ids,
        response_ids=np.array([token.id], np.int32),
        logprobs=np.array([token.logprob], np.float32),
    )


def run(
    cell: Cell, arm: Arm, seed: int, learning_rate: float, steps: int = 25, held_out: int = 200, rules: Rules = BEDS
) -> dict[str, Any]:
    """Train and evaluate: the mean reward and the share of tool calls that work in each step, and the reward after."""
    torch.set_num_threads(1)
    simulation, rng = Simulation(arm, seed, learning_rate, rules), random.Random(f"train/{seed}")
    rewards, worked = list[float](), list[float]()
    for _ in range(steps):
        episodes = simulation.learn([rules.draw(rng, **cell) for _ in range(GROUPS)])
        rewards.append(fmean(episode.terminal or 0.0 for episode in episodes))
        results = [result.status is ToolStatus.OK for e in episodes for t in e.transitions for result in t.tool_results]
        worked.append(fmean(results) if results else 0.0)
    rng = random.Random(f"eval/{seed}")
    after = simulation.play([rules.draw(rng, **{**cell, **rules.held_out}) for _ in range(held_out)])
    return {
        "rewards": [round(reward, 4) for reward in rewards],
        "tools_ok": [round(share, 3) for share in worked],
        "after": round(fmean(episode.terminal or 0.0 for episode in after), 4),
    }
