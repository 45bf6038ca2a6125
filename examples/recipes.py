"""The recipe of a tiny policy: whom it imitates, how large it is, and how long it learns.

An example whose policy was made so has a `RECIPE` in its `make_NAME.py`, which `make_policy.py` imports.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = dict[str, Any]
"""A chat message as an OpenAI client sends it."""
Situation = TypeVar("Situation")
Choice = TypeVar("Choice")


def opened(system: str, question: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def says(content: str) -> Message:
    return {"role": "assistant", "content": content}


def uses(tool: str, arguments: str, result: str, call_id: str = "call_0") -> list[Message]:
    call = {"type": "function", "id": call_id, "function": {"name": tool, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": call_id},
    ]


def chooser(name: str, shares: Mapping[Situation, Mapping[Choice, float]]) -> Callable[[Situation], Choice]:
    """Chooses in each situation by these shares; the same for the same name, always."""
    rng = random.Random(name)
    return lambda situation: rng.choices(*zip(*shares[situation].items(), strict=True))[0]


@dataclass(frozen=True)
class Demonstrations:
    """The conversations that the policy imitates."""

    conversation: Callable[[int, int], list[Message]]
    """The demonstration of a seed and an index; indices have no end."""
    tools: list[dict[str, Any]]
    """The agent's tools, as its client sends them."""
    lessons: Callable[[int, int], list[Message]] | None = None
    """Demonstrations of nothing but the right behaviour, where it has to copy much of what it was told."""
    phrases: tuple[str, ...] = ()
    """Texts that are one token each. What every tool call begins with is written sooner so."""
    names: tuple[str, ...] = ()
    """More of them: the names of a world."""

    def render(
        self, tokenizer: PreTrainedTokenizerBase, messages: list[Message], add_generation_prompt: bool = False
    ) -> str:
        tools: list[Any] = self.tools
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return str(text)


@dataclass(frozen=True)
class Shape:
    """How large the policy is."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    initializer_range: float = 0.02
    """Standard deviation of the first weights. One that is very narrow learns sooner from about 1/√hidden."""
    copies: bool = False
    """Begin with attention that copies what it looks at, so that copying is learned in far fewer steps."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a policy becomes, but the seed."""

    shown: Demonstrations
    shape: Shape
    steps: int
    batch: int = 64
    learning_rate: float = 2e-3
    reading: float = 1 / 3
    """The share of the steps that imitates the lessons, before it learns habits; without lessons there is none."""
