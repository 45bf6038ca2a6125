"""Makes the tiny policy of an example: a tokenizer, a chat template and a causal LM that imitates demonstrations.

    python examples/imitation.py calc --out examples/calc/policy

What it writes is an ordinary Hugging Face checkpoint of the Qwen2 architecture, with a byte-level BPE of its own, a
ChatML template and Hermes-style tool calls. The `RECIPE` of the example's `make_NAME.py` says what it looks like. One
of math, sql or calc takes twenty minutes to an hour of two cores, the others some minutes.
"""

from __future__ import annotations

import argparse
import importlib
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from recipes import Demonstrations, Recipe, Shape
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

EXAMPLES = ("calc", "math", "sql", "rag", "trip", "beds", "online")
"""Those whose policy is made here. The `RECIPE` of each is in its `make_NAME.py`."""
CHAT_TEMPLATE = Path(__file__).with_suffix(".jinja")
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
"""Single tokens like the control tokens, but part of the text: decoding must not skip them."""
CONTEXT = 1024
TOKENIZER_CONVERSATIONS = 4000
PART = 16
LEARNING_RATE_WARMUP = 50
NO_LABEL = -100


def make_model(shape: Shape, tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights; its MLP is three times as wide as its hidden state."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=shape.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    if shape.copies:
        for layer in model.model.layers:
            begin_copying(layer.self_attn, shape.heads // shape.kv_heads)
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
    for row, (ids, by_whom) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        labels = [token if everything or by_policy else NO_LABEL for token, by_policy in zip(ids, by_whom, strict=True)]
        labels_BT[row, : len(ids)] = torch.tensor(labels)
    return ids_BT, labels_BT


def imitate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, seed: int) -> None:
    """Train on batches of fresh demonstrations, in two parts.

    Before habits a policy has to learn to read. So the first part imitates the lessons; where there are none, it learns
    to predict every token of the demonstrations, not only the replies.
    """
    shown, steps, batch = recipe.shown, recipe.steps, recipe.batch
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, recipe.beta2), weight_decay=0.01
    )
    names = torch.tensor(tokenizer.convert_tokens_to_ids(list(shown.names)), dtype=torch.long, device=model.device)
    model.get_input_embeddings().weight.register_hook(lambda gradient: gradient.index_fill(0, names, 0.0))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        bar = progress.add_task("imitation", total=steps)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * schedule(step, steps)
            first = TOKENIZER_CONVERSATIONS + step * batch
            is_reading = step < int(steps * recipe.reading)
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny policy that an example trains.")
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the checkpoint to")
    parser.add_argument("--seed", type=int, default=0, help="of the demonstrations and the first weights")
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).with_name(options.example)))
    recipe: Recipe = importlib.import_module(f"make_{options.example}").RECIPE
    assert recipe.shape is not None
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(recipe.shown, recipe.shape.vocabulary, options.seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = make_model(recipe.shape, tokenizer)
    imitate(model, tokenizer, recipe, options.seed)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
