"""The tiny policy's folder: every loader encodes alike, and the chat template renders what it was warmed up on."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from demonstrations import TOOLS, Message, conversation, segments
from hypothesis import given
from hypothesis import strategies as st
from make_policy import CHAT_TEMPLATE, MARKS, encode, make_model, make_tokenizer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

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


def test_the_shipped_template_is_the_source(tokenizer: Any) -> None:
    assert tokenizer.chat_template == CHAT_TEMPLATE.read_text()


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    def forgetful(messages: list[Message], add_generation_prompt: bool) -> str:
        return f"{len(messages)} messages"

    with pytest.raises(ValueError, match="append only"):
        segments(solved("{}"), forgetful)


def test_every_loader_encodes_as_the_warm_up_did(tokenizer: Any) -> None:
    """transformers picks a class by the model type: here it must not matter which."""
    core = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
    generic = PreTrainedTokenizerFast.from_pretrained(POLICY)
    for messages in CONVERSATIONS:
        trained_with, _ = encode(messages, tokenizer)
        whole = render(tokenizer, messages).removesuffix("\n")
        assert tokenizer.encode(whole, add_special_tokens=False) == trained_with
        assert generic.encode(whole, add_special_tokens=False) == trained_with
        assert core.encode(whole, add_special_tokens=False).ids == trained_with
        assert tokenizer.decode(trained_with) == generic.decode(trained_with) == whole


def test_saving_again_changes_no_id(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((POLICY / "config.json").read_text())
    again = AutoTokenizer.from_pretrained(tmp_path)
    for messages in CONVERSATIONS[:50]:
        assert encode(messages, again) == encode(messages, tokenizer)


def test_the_script_makes_the_shipped_tokenizer(tokenizer: Any) -> None:
    made = make_tokenizer(seed=0)
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.chat_template == tokenizer.chat_template
    assert [encode(each, made) for each in CONVERSATIONS] == [encode(each, tokenizer) for each in CONVERSATIONS]


@given(text=st.text(st.characters(exclude_categories=["Cs"], codec="ascii")))
def test_any_ascii_text_survives_the_tokenizer(text: str) -> None:
    core = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
    assert core.decode(core.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_digits_are_single_and_marks_are_text(tokenizer: Any) -> None:
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    for mark in MARKS:
        [token] = tokenizer.encode(mark, add_special_tokens=False)
        assert tokenizer.decode([token], skip_special_tokens=True) == mark
    ends = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert ends == [tokenizer.eos_token_id]
    assert tokenizer.decode(ends, skip_special_tokens=True) == ""


def test_prompts_are_short(tokenizer: Any) -> None:
    lengths = [len(encode(messages, tokenizer)[0]) for messages in CONVERSATIONS]
    assert max(lengths) <= 128


def test_the_checkpoint_is_what_the_readme_says(tokenizer: Any) -> None:
    config = json.loads((POLICY / "config.json").read_text())
    generation = json.loads((POLICY / "generation_config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["vocab_size"] == len(tokenizer) == 512
    assert config["tie_word_embeddings"] is True
    assert config["hidden_size"] // config["num_attention_heads"] == 32
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
    assert make_model(tokenizer).num_parameters() == 854_144
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
