"""The tiny policy: its chat template renders what it was warmed up on, and it would rather guess."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from demonstrations import TOOLS, Message, conversation
from make_policy import DEMONSTRATIONS, SHAPE
from transformers import AutoModelForCausalLM, AutoTokenizer

POLICY = Path(__file__).parents[1] / "policy"
CONVERSATIONS = [conversation(seed, index) for seed in (0, 9) for index in range(150)]

SOLVED = """\
<|im_start|>system
Solve the problem. Use the calculator.
<tools>
calculator(expression)
</tools><|im_end|>
<|im_start|>user
What is 12 times 7?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "calculator", "arguments": {"expression": "12*7"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
84
</tool_response><|im_end|>
<|im_start|>assistant
The answer is 84.<|im_end|>
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(POLICY)


def solved(arguments: Any) -> list[Message]:
    call = {"type": "function", "id": "x", "function": {"name": "calculator", "arguments": arguments}}
    return [
        {"role": "system", "content": "Solve the problem. Use the calculator."},
        {"role": "user", "content": "What is 12 times 7?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "84", "tool_call_id": "x"},
        {"role": "assistant", "content": "The answer is 84."},
    ]


def render(tokenizer: Any, messages: list[Message], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, **options))


@pytest.mark.parametrize("arguments", ['{"expression": "12*7"}', {"expression": "12*7"}])
def test_the_template_renders_arguments_as_text_or_as_an_object_alike(tokenizer: Any, arguments: Any) -> None:
    assert render(tokenizer, solved(arguments)) == SOLVED


def test_the_template_without_tools_and_system(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_the_template_renders_text_beside_calls_and_parallel_calls(tokenizer: Any) -> None:
    messages = solved("{}")
    messages[2] |= {"content": "Twice.", "tool_calls": messages[2]["tool_calls"] * 2}
    messages.insert(4, {**messages[3], "content": "85"})
    text = render(tokenizer, messages)
    call = '<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>'
    assert f"assistant\nTwice.\n{call}\n{call}<|im_end|>\n" in text
    responses = "<tool_response>\n84\n</tool_response>\n<tool_response>\n85\n</tool_response>"
    assert f"<|im_start|>user\n{responses}<|im_end|>\n" in text


def test_prompts_are_short(tokenizer: Any) -> None:
    lengths = [len(DEMONSTRATIONS.encode(tokenizer, messages)[0]) for messages in CONVERSATIONS]
    assert max(lengths) <= 128


def test_the_checkpoint_is_what_the_readme_says(tokenizer: Any) -> None:
    config = json.loads((POLICY / "config.json").read_text())
    generation = json.loads((POLICY / "generation_config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["vocab_size"] == len(tokenizer) == 512
    assert config["tie_word_embeddings"] is True
    assert config["hidden_size"] // config["num_attention_heads"] == 32
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
    assert SHAPE.model(tokenizer).num_parameters() == 854_144
    assert (POLICY / "model.safetensors").stat().st_size < 4_000_000


def test_the_policy_can_do_it_and_would_rather_guess(tokenizer: Any) -> None:
    """Before training the likeliest reply is the guess; told to call the tool, it copies held-out numbers."""
    from problems import Split, problem

    model = AutoModelForCausalLM.from_pretrained(POLICY)
    copied = guessed = digits = 0
    for index in range(24):
        asked = problem(Split.EVAL, 0, index)
        prompt = [
            {"role": "system", "content": "Solve the problem. Use the calculator."},
            {"role": "user", "content": asked.question},
        ]
        encoded = partial(tokenizer.encode, add_special_tokens=False)
        head = encoded(render(tokenizer, prompt, add_generation_prompt=True))
        guess = encoded("The answer is 42.<|im_end|>")
        call = encoded('<tool_call>\n{"name": "calculator", "arguments": {"expression": "' + asked.expression)
        with torch.inference_mode():
            likeliest_after_guess, likeliest_after_call = (
                model(input_ids=torch.tensor([head + said])).logits[0].argmax(-1).tolist() for said in (guess, call)
            )
        guessed += likeliest_after_guess[len(head) - 1 : -1] == guess
        is_digit = [tokenizer.decode([token]).isdigit() for token in call]
        predicted = likeliest_after_call[len(head) - 1 : -1]
        copied += sum(p == c for p, c, d in zip(predicted, call, is_digit, strict=True) if d)
        digits += sum(is_digit)
    assert guessed >= 22
    assert copied / digits > 0.95
