"""Makes a tiny policy to train: a tokenizer, a chat template and a causal LM that imitates demonstrations.

What it writes is an ordinary Hugging Face checkpoint of the Qwen2 architecture, with a byte-level BPE of its own, a
ChatML template and Hermes-style tool calls. An example that needs one says what it looks like:

    from imitation import Demonstrations, Shape, make

    shape = Shape(vocabulary=512, hidden=128, layers=4, heads=4, kv_heads=2)
    make(Demonstrations(conversation, TOOLS), shape, steps=1500)
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import (
    AddedToken,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

Message: TypeAlias = dict[str, Any]
"""A chat message as an OpenAI client sends it."""

CHAT_TEMPLATE = Path(__file__).with_suffix(".jinja")
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
"""Single tokens like the control tokens, but part of the text: decoding must not skip them."""
CONTEXT = 1024
TOKENIZER_CONVERSATIONS = 4000
PART = 16
LEARNING_RATE_WARMUP = 50
NO_LABEL = -100


@dataclass(frozen=True)
class Demonstrations:
    """What the policy imitates."""

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
        said: list[bool] = []
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
                said += [by_policy] * len(piece)
            done = whole
        return ids, said


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

    def model(self, tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
        """A Qwen2 with random weights; its MLP is three times as wide as its hidden state."""
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            initializer_range=self.initializer_range,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
        if self.copies:
            for layer in model.model.layers:
                begin_copying(layer.self_attn, self.heads // self.kv_heads)
        return model


def begin_copying(attention: Qwen2Attention, heads_per_value: int) -> None:
    """Make each head's output projection the transpose of its value projection.

    A head then adds a part of what it looks at to the residual stream, unturned (mimetic initialization, arXiv
    2305.09828).
    """
    value_GDH = attention.v_proj.weight.detach().unflatten(0, (-1, attention.head_dim))
    output = value_GDH.repeat_interleave(heads_per_value, dim=0).flatten(0, 1).T
    attention.o_proj.weight.data.copy_(output)


def make_tokenizer(shown: Demonstrations, vocabulary: int, seed: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with single digits, trained on demonstrations.

    transformers chooses a tokenizer's class by the model type beside it, whatever the tokenizer's own files say. So
    this one *is* Qwen2's: the same normalizer, pre-tokenizer and decoder, with a vocabulary of its own.
    """
    template = CHAT_TEMPLATE.read_text()
    control = [TURN_START, TURN_END]
    stock = Qwen2Tokenizer(eos_token=TURN_END, pad_token=END_OF_TEXT, chat_template=template, model_max_length=CONTEXT)
    marks = (*MARKS, *shown.phrases, *shown.names)
    taken_out = re.compile("|".join(map(re.escape, (*control, *marks))))
    texts = (
        part
        for index in range(TOKENIZER_CONVERSATIONS)
        for part in taken_out.split(shown.render(stock, shown.conversation(seed, index)))
    )
    tokenizer: PreTrainedTokenizerBase = stock.train_new_from_iterator(
        texts, vocabulary - len(marks), new_special_tokens=control, show_progress=False
    )  # type: ignore[no-untyped-call]
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in marks])
    tokenizer.chat_template = template
    return tokenizer


def collate(rows: Sequence[tuple[list[int], list[bool]]], everything: bool) -> tuple[Tensor, Tensor]:
    """Right-padded ids_BT and labels_BT: of every token, or of what the policy says."""
    longest = max(len(ids) for ids, _ in rows)
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    labels_BT = torch.full((len(rows), longest), NO_LABEL)
    for row, (ids, said) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        labels = [token if everything or by_policy else NO_LABEL for token, by_policy in zip(ids, said, strict=True)]
        labels_BT[row, : len(ids)] = torch.tensor(labels)
    return ids_BT, labels_BT


def imitate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    shown: Demonstrations,
    *,
    seed: int,
    steps: int,
    batch: int,
    learning_rate: float,
    beta2: float,
    reading: float,
) -> None:
    """Train on `steps` batches of fresh demonstrations, in two parts.

    Before habits a policy has to learn to read. So the first part, a share of `reading`, imitates the lessons; where
    there are none, it learns to predict every token of the demonstrations, not only the replies.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, beta2), weight_decay=0.01)
    names = torch.tensor(tokenizer.convert_tokens_to_ids(list(shown.names)), dtype=torch.long, device=model.device)
    model.get_input_embeddings().weight.register_hook(lambda gradient: gradient.index_fill(0, names, 0.0))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        bar = progress.add_task("imitation", total=steps)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * schedule(step, steps)
            first = TOKENIZER_CONVERSATIONS + step * batch
            is_reading = step < int(steps * reading)
            show = shown.lessons if is_reading and shown.lessons else shown.conversation
            encoded = [shown.encode(tokenizer, show(seed, index)) for index in range(first, first + batch)]
            loss = imitation_step(model, encoded, everything=is_reading and shown.lessons is None)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            progress.update(bar, advance=1, description=f"imitation, loss {loss:.3f}")


def imitation_step(model: PreTrainedModel, encoded: Sequence[tuple[list[int], list[bool]]], everything: bool) -> float:
    """Add the gradient of one batch; short and long conversations go apart, so that few pads are computed."""
    by_length = sorted(encoded, key=lambda row: len(row[0]))
    parts = [collate(by_length[start : start + PART], everything) for start in range(0, len(by_length), PART)]
    labels = sum(int((labels_BT[:, 1:] != NO_LABEL).sum()) for _, labels_BT in parts)
    total = 0.0
    for ids_BT, labels_BT in parts:
        loss = summed_loss(model, ids_BT.to(model.device), labels_BT.to(model.device)) / labels
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def summed_loss(model: Qwen2ForCausalLM, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
    """The sum of the labels' negative log-likelihoods. Logits are computed only where a label follows."""
    hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
    followed_BT = labels_BT[:, 1:] != NO_LABEL
    logits_NV = model.lm_head(hidden_BTD[:, :-1][followed_BT])
    return torch.nn.functional.cross_entropy(logits_NV, labels_BT[:, 1:][followed_BT], reduction="sum")


def schedule(step: int, steps: int) -> float:
    """The share of the learning rate: linear warm-up, then a cosine to zero."""
    warmup = min(LEARNING_RATE_WARMUP, math.ceil(steps / 10))
    return min(1.0, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2


def make(
    shown: Demonstrations,
    shape: Shape,
    *,
    steps: int,
    batch: int = 64,
    learning_rate: float = 2e-3,
    beta2: float = 0.999,
    reading: float = 1 / 3,
) -> None:
    """The command line of a script that makes a policy: --out FOLDER, --steps, --seed."""
    parser = argparse.ArgumentParser(description="Make the tiny policy that the example trains.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=steps, help="imitation steps")
    parser.add_argument("--seed", type=int, default=0, help="of the demonstrations and the first weights")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(shown, shape.vocabulary, options.seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = shape.model(tokenizer)
    imitate(
        model,
        tokenizer,
        shown,
        seed=options.seed,
        steps=options.steps,
        batch=batch,
        learning_rate=learning_rate,
        beta2=beta2,
        reading=reading,
    )
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
