"""The recipe of a tiny policy: whom it imitates, how large it is, and how long it learns.

An example whose policy was made so has a `RECIPE` in its `make_NAME.py`, which `imitation.py` imports.
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
    """How the conversation of an agent begins."""
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def says(content: str) -> Message:
    return {"role": "assistant", "content": content}


def uses(tool: str, arguments: str, result: str, call_id: str = "call_0") -> list[Message]:
    """A tool call, and what the tool says to it."""
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
    """More of them, whose embeddings are not trained: what has learned to copy some then copies all."""

    def render(
        self, tokenizer: PreTrainedTokenizerBase, messages: list[Message], add_generation_prompt: bool = False
    ) -> str:
        """A conversation as text, by the tokenizer's chat template."""
        tools: list[Any] = self.tools
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return str(text)

    def encode(self, tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, and which of them the policy says.

        Every call of an agent renders the whole conversation anew; so is it done here, and a template that renders
        an earlier turn differently is an error.
        """
        ids: list[int] = []
        by_whom: list[bool] = []
        done = ""
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(tokenizer, messages[:turn], add_generation_prompt=True)
            whole = self.render(tokenizer, messages[: turn + 1]).removesuffix("\n")
            if not prompt.startswith(done) or not whole.startswith(prompt):
                raise ValueError("The chat template renders an earlier turn differently than before: make it append.")
            for text, by_policy in ((prompt[len(done) :], False), (whole[len(prompt) :], True)):
                piece = tokenizer.encode(text, add_special_tokens=False)
                ids += piece
                by_whom += [by_policy] * len(piece)
            done = whole
        return ids, by_whom


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
    shape: Shape | None
    """None: that of a model that is there already."""
    steps: int
    batch: int = 64
    learning_rate: float = 2e-3
    beta2: float = 0.999
    reading: float = 1 / 3
    """The share of the steps in which it learns to read, before it learns habits."""
