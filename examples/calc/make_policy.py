"""Make the tiny policy that the example trains: a tokenizer, a chat template and a warm-started causal LM.

    python examples/calc/make_policy.py --out examples/calc/policy

The folder it writes is an ordinary Hugging Face checkpoint of the Qwen2 architecture. About twenty minutes on two
cores.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from demonstrations import TOOLS, Message, conversation, segments
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import AddedToken, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
"""Single tokens like the control tokens, but part of the text: decoding must not skip them."""
VOCABULARY = 512
CONTEXT = 1024
TOKENIZER_CONVERSATIONS = 4000
BATCH = 64
PART = 16
LEARNING_RATE = 2e-3
LEARNING_RATE_WARMUP = 50
NO_LABEL = -100


def make_tokenizer(seed: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with single digits, trained on demonstrations.

    transformers chooses a tokenizer's class by the model type beside it, whatever the tokenizer's own files say. So
    this one *is* Qwen2's: the same normalizer, pre-tokenizer and decoder, with a vocabulary of its own.
    """
    template = CHAT_TEMPLATE.read_text()
    control = [TURN_START, TURN_END]
    stock = Qwen2Tokenizer(eos_token=TURN_END, pad_token=END_OF_TEXT, chat_template=template, model_max_length=CONTEXT)
    taken_out = re.compile("|".join(map(re.escape, (*control, *MARKS))))
    texts = (
        part
        for index in range(TOKENIZER_CONVERSATIONS)
        for part in taken_out.split(render(stock, conversation(seed, index)))
    )
    tokenizer: PreTrainedTokenizerBase = stock.train_new_from_iterator(
        texts, VOCABULARY - len(MARKS), new_special_tokens=control, show_progress=False
    )  # type: ignore[no-untyped-call]
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    tokenizer.chat_template = template
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    """A Qwen2 with 0.85 million random weights."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], add_generation_prompt: bool = False) -> str:
    """A conversation as text, by the tokenizer's chat template."""
    tools: list[Any] = list(TOOLS)
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return str(text)


def encode(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and which of them the policy says."""
    ids: list[int] = []
    said: list[bool] = []
    for text, by_policy in segments(messages, partial(render, tokenizer)):
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        said += [by_policy] * len(piece)
    return ids, said


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


def imitate(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, seed: int, steps: int) -> None:
    """Train on `steps` batches of fresh demonstrations."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        bar = progress.add_task("imitation", total=steps)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            first = TOKENIZER_CONVERSATIONS + step * BATCH
            encoded = [encode(conversation(seed, index), tokenizer) for index in range(first, first + BATCH)]
            # Reading the problems is learned first: predicting every token teaches it sooner than the replies alone.
            loss = imitation_step(model, encoded, everything=step < steps // 3)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            progress.update(bar, advance=1, description=f"imitation, loss {loss:.3f}")


def imitation_step(model: Qwen2ForCausalLM, encoded: Sequence[tuple[list[int], list[bool]]], everything: bool) -> float:
    """Add the gradient of one batch; short and long conversations go apart, so that few pads are computed."""
    by_length = sorted(encoded, key=lambda row: len(row[0]))
    parts = [collate(by_length[start : start + PART], everything) for start in range(0, len(by_length), PART)]
    labels = sum(int((labels_BT[:, 1:] != NO_LABEL).sum()) for _, labels_BT in parts)
    total = 0.0
    for ids_BT, labels_BT in parts:
        loss = model(
            input_ids=ids_BT.to(model.device), labels=labels_BT.to(model.device), num_items_in_batch=labels
        ).loss
        loss.backward()
        total += loss.item()
    return total


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    return LEARNING_RATE * min(1.0, (step + 1) / LEARNING_RATE_WARMUP) * (1 + math.cos(math.pi * step / steps)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=2500, help="imitation steps")
    parser.add_argument("--seed", type=int, default=0, help="of the demonstrations and the first weights")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(options.seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = make_model(tokenizer)
    imitate(model, tokenizer, options.seed, options.steps)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
