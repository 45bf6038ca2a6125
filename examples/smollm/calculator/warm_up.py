"""Show SmolLM2 a few calls of the calculator, so that it now and then makes one by itself:

python examples/smollm/calculator/warm_up.py --model examples/smollm/policy --out examples/smollm/calculator/policy

A dozen batches are enough for that; when to call, and to trust the result, is what training teaches.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from sum_tool import TOOLS
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from agl_chat.conversation import ChatText, load_tokenizer

sys.path += [str(folder) for folder in Path(__file__).parents[1:3]]
from imitation import imitate
from recipes import Demonstrations, Message, Recipe
from sums import Split, sums


@dataclass(frozen=True)
class PlainTextDemonstrations(Demonstrations):
    """Demonstrations as the torch engine writes them for a model whose template knows no tools."""

    def render(
        self, tokenizer: PreTrainedTokenizerBase, messages: list[Message], add_generation_prompt: bool = False
    ) -> str:
        """A conversation as the engine renders it."""
        text = ChatText(tokenizer, [tokenizer.eos_token_id])
        return text.render(messages, tools=self.tools, prompt=add_generation_prompt)


def conversation(seed: int, index: int) -> list[Message]:
    """One of training's sums, worked out with the calculator."""
    task = sums(index, seed, split=Split.TRAIN)
    question, result = task.input["question"], task.metadata["result"]
    expression = question.rsplit(": ", 1)[1].removesuffix(" =")
    function = {"name": "calculator", "arguments": {"expression": expression}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": result},
        {"role": "assistant", "content": f"The answer is {result}."},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the folder of the converted model")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write; if it is there, nothing is done")
    parser.add_argument("--steps", type=int, default=12, help="batches of eight demonstrations")
    options = parser.parse_args()
    if options.out.is_dir():
        return
    tokenizer = load_tokenizer(str(options.model))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    shown = PlainTextDemonstrations(conversation, TOOLS)
    recipe = Recipe(shown, None, options.steps, batch=8, learning_rate=3e-5, beta2=0.98, reading=0.0)
    imitate(model, tokenizer, recipe, seed=0)
    with tempfile.TemporaryDirectory(dir=options.out.parent) as folder:
        made = Path(folder) / "model"
        model.to(torch.bfloat16).save_pretrained(made)
        tokenizer.save_pretrained(made)
        os.replace(made, options.out)


if __name__ == "__main__":
    main()
