"""The tiny policy: it knows how, and would rather guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from make_math_policy import DEMONSTRATIONS, SHAPE
from math_demonstrations import FLAWLESS, GUESS, Message, behave, conversation
from math_problems import Split, problem
from transformers import AutoModelForCausalLM, AutoTokenizer

POLICY = Path(__file__).parents[1] / "policy"
PROBLEMS = [problem(split, 0, index) for split in list(Split)[1:] for index in range(16)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(POLICY)


def flawless(asked: Any) -> list[Message]:
    return behave(asked, lambda situation: next(iter(FLAWLESS[situation])))


def test_the_checkpoint_is_what_the_readme_says(tokenizer: Any) -> None:
    config = json.loads((POLICY / "config.json").read_text())
    generation = json.loads((POLICY / "generation_config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["vocab_size"] == len(tokenizer)
    assert config["hidden_size"] // config["num_attention_heads"] == 32
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
    assert 800_000 < SHAPE.model(tokenizer).num_parameters() < 900_000
    assert (POLICY / "model.safetensors").stat().st_size < 4_000_000


def test_conversations_are_short(tokenizer: Any) -> None:
    shown = [conversation(seed, index) for seed in (0, 9) for index in range(100)]
    lengths = [len(DEMONSTRATIONS.encode(tokenizer, messages)[0]) for messages in [*shown, *map(flawless, PROBLEMS)]]
    assert max(lengths) <= 192


def test_the_policy_can_do_it_and_would_rather_guess(tokenizer: Any) -> None:
    """On held-out problems: the likeliest reply is the guess, but the digits of each right call are likely too."""
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    guess = tokenizer.encode(f"{GUESS}<|im_end|>", add_special_tokens=False)
    guessed = copied = digits = 0
    for asked in PROBLEMS:
        messages = flawless(asked)
        head = tokenizer.encode(
            DEMONSTRATIONS.render(tokenizer, messages[:2], add_generation_prompt=True), add_special_tokens=False
        )
        ids, said = DEMONSTRATIONS.encode(tokenizer, messages)
        with torch.inference_mode():
            after_guess, after_call = (
                model(input_ids=torch.tensor([each])).logits[0].argmax(-1).tolist() for each in (head + guess, ids)
            )
        guessed += after_guess[len(head) - 1 : -1] == guess
        is_digit = [
            by_policy and tokenizer.decode([token]).isdigit() for token, by_policy in zip(ids, said, strict=True)
        ]
        copied += sum(p == t for p, t, d in zip(after_call[:-1], ids[1:], is_digit[1:], strict=True) if d)
        digits += sum(is_digit)
    assert guessed >= 0.9 * len(PROBLEMS)
    assert copied / digits > 0.9
