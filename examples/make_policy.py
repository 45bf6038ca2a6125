"""Makes the tiny policy of an example: a tokenizer, random weights, and SFT on demonstrations (`agl train --from`).

    python examples/make_policy.py trip --out examples/trip/policy

It writes an ordinary Hugging Face checkpoint of the Qwen2 architecture, or of Qwen3, with a byte-level BPE of its own,
a ChatML template and Hermes-style tool calls. The `RECIPE` of the example's `make_NAME.py` says what it looks like.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from recipes import Demonstrations, Recipe, Shape
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

HERE = Path(__file__).resolve().parent
EXAMPLES = ("calc", "math", "sql", "rag", "trip", "beds", "online", "textworld", "coding")
"""Those whose policy is made here. The `RECIPE` of each is in its `make_NAME.py`."""
QWEN2 = "qwen2"
CHAT_TEMPLATE = HERE / "chatml.jinja"
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
"""Single tokens like the control tokens, but part of the text: decoding must not skip them."""
CONTEXT = 1024
TOKENIZER_CONVERSATIONS = 4000
LEARNING_RATE_WARMUP = 50


def make_model(shape: Shape, tokenizer: PreTrainedTokenizerBase, architecture: str) -> PreTrainedModel:
    """A model with random weights; its MLP is three times as wide as its hidden state."""
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=shape.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    if shape.copies:
        for layer in model.model.layers:
            begin_copying(layer.self_attn, shape.heads // shape.kv_heads)
    return model


def begin_copying(attention: Qwen2Attention | Qwen3Attention, heads_per_value: int) -> None:
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


def write_random(recipe: Recipe, seed: int, out: Path, architecture: str = QWEN2) -> None:
    """Write a policy with random weights to the folder `out`."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(recipe.shown, recipe.shape.vocabulary, seed)
    make_model(recipe.shape, tokenizer, architecture).save_pretrained(out)
    tokenizer.save_pretrained(out)


def teach(example: Path, recipe: Recipe, seed: int, policy: Path, out: Path) -> None:
    """Train `policy` on fresh demonstrations, in two parts, and write what comes of it to `out`.

    Before habits a policy has to learn to read. So the first part imitates the lessons, if there are any. The step size
    of the second begins where a cosine over both would be: with a large one, habits would cost what was learned before.
    """
    lessons = int(recipe.steps * recipe.reading) if recipe.shown.lessons else 0
    rest = (1 + math.cos(math.pi * lessons / recipe.steps)) / 2
    first = TOKENIZER_CONVERSATIONS
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(temporary)
        for part, show, steps, schedule, share in (
            ("lessons", recipe.shown.lessons, lessons, "constant", 1.0),
            ("habits", recipe.shown.conversation, recipe.steps - lessons, "cosine", rest),
        ):
            if show is None or not steps:
                continue
            file = runs / f"{part}.jsonl"
            with file.open("w") as demonstrations:
                for index in range(first, first := first + steps * recipe.batch):
                    line = {"messages": show(seed, index), "tools": recipe.shown.tools}
                    demonstrations.write(json.dumps(line) + "\n")
            settings = {
                "name": part,
                "runs": runs,
                "seed": seed,
                "algorithm.name": "sft",
                "algorithm.sft.aggregation": "token-mean",
                "policies.default.model.path": policy,
                "policies.default.optimizer.learning_rate": share * recipe.learning_rate,
                "policies.default.optimizer.schedule": schedule,
                "policies.default.optimizer.warmup_steps": min(LEARNING_RATE_WARMUP, -(-steps // 10)),
                "train.steps": steps,
                "train.groups_per_step": recipe.batch,
                "train.group_size": 1,
                "train.checkpoint_every": steps,
                "eval.every": 0,
            }
            command = [Path(sys.executable).with_name("agl"), "train", example / "train.toml", "--from", file]
            subprocess.run([*command, *(f"--set={key}={value}" for key, value in settings.items())], check=True)
            policy = runs / part / "model"
        shutil.copytree(policy, out, dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny policy that an example trains.")
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the checkpoint to")
    parser.add_argument("--architecture", choices=(QWEN2, "qwen3"), default=QWEN2, help="a server may know few")
    parser.add_argument("--seed", type=int, default=0, help="of the demonstrations and the first weights")
    options = parser.parse_args()
    example = HERE / options.example
    sys.path.append(str(example))
    recipe: Recipe = importlib.import_module(f"make_{options.example}").RECIPE
    with tempfile.TemporaryDirectory() as random:
        write_random(recipe, options.seed, Path(random), options.architecture)
        teach(example, recipe, options.seed, Path(random), options.out)


if __name__ == "__main__":
    main()
