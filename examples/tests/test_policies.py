"""The tiny policies: every loader encodes alike, recipes make the shipped tokenizers; what they say."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from make_policy import CHAT_TEMPLATE, EXAMPLES, MARKS, make_tokenizer
from recipes import Demonstrations, Message, Shape, opened, says, uses
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[1]


class Made(NamedTuple):
    """A policy's folder and what it was made of."""

    folder: Path
    shown: Demonstrations
    shape: Shape
    tokenizer: Any

    def conversations(self) -> Iterator[list[Message]]:
        return (self.shown.conversation(seed, index) for seed in (0, 9) for index in range(25))


QUICKLY_MADE = ("calc", "beds")
"""Whose tokenizers are trained in a second; the others take five and differ in their texts alone."""


@pytest.fixture(scope="module", params=EXAMPLES)
def policy(request: pytest.FixtureRequest) -> Made:
    if request.param == "textworld":
        pytest.importorskip("textworld.generator", reason="make textworld installs it")
    recipe = importlib.import_module(f"make_{request.param}").RECIPE
    folder = FOLDER / request.param / "policy"
    return Made(folder, recipe.shown, recipe.shape, AutoTokenizer.from_pretrained(folder))


def test_every_loader_encodes_alike(policy: Made) -> None:
    """transformers picks a class by the model type: here it must not matter which."""
    core = Tokenizer.from_file(str(policy.folder / "tokenizer.json"))
    generic = PreTrainedTokenizerFast.from_pretrained(policy.folder)
    for messages in policy.conversations():
        text = policy.shown.render(policy.tokenizer, messages)
        ids = policy.tokenizer.encode(text, add_special_tokens=False)
        assert generic.encode(text, add_special_tokens=False) == ids
        assert core.encode(text, add_special_tokens=False).ids == ids
        assert policy.tokenizer.decode(ids) == generic.decode(ids) == text


@pytest.mark.parametrize(
    "policy",
    [name if name in QUICKLY_MADE else pytest.param(name, marks=pytest.mark.storm) for name in EXAMPLES],
    indirect=True,
)
def test_the_recipe_makes_the_shipped_tokenizer(policy: Made) -> None:
    fresh = make_tokenizer(policy.shown, policy.shape.vocabulary, seed=0)
    assert fresh.get_vocab() == policy.tokenizer.get_vocab()
    assert fresh.chat_template == policy.tokenizer.chat_template == CHAT_TEMPLATE.read_text()
    for messages in policy.conversations():
        text = policy.shown.render(fresh, messages)
        assert text == policy.shown.render(policy.tokenizer, messages)
        assert fresh.encode(text) == policy.tokenizer.encode(text)


def test_digits_are_single_and_marks_are_text(policy: Made) -> None:
    assert policy.tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    for mark in (*MARKS, *policy.shown.phrases, *policy.shown.names):
        [token] = policy.tokenizer.encode(mark, add_special_tokens=False)
        assert policy.tokenizer.decode([token], skip_special_tokens=True) == mark
    ends = policy.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert ends == [policy.tokenizer.eos_token_id]
    assert policy.tokenizer.decode(ends, skip_special_tokens=True) == ""


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


def solved(arguments: Any) -> list[Message]:
    question = opened("Solve the problem. Use the calculator.", "What is 12 times 7?")
    return [*question, *uses("calculator", arguments, "84"), says("The answer is 84.")]


def test_the_template_renders_calls_as_text_or_object_parallel_ones_and_text_beside_them() -> None:
    from make_calc import TOOLS

    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "calc" / "policy")
    render = partial(tokenizer.apply_chat_template, tools=TOOLS, tokenize=False)
    for arguments in ('{"expression": "12*7"}', {"expression": "12*7"}):
        assert render(solved(arguments)) == SOLVED
    messages = solved("{}")
    messages[2] |= {"content": "Twice.", "tool_calls": messages[2]["tool_calls"] * 2}
    messages.insert(4, {**messages[3], "content": "85"})
    call = '<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>'
    assert f"assistant\nTwice.\n{call}\n{call}<|im_end|>\n" in render(messages)
    results = "<tool_response>\n84\n</tool_response>\n<tool_response>\n85\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>\n" in render(messages)
    plain = render([{"role": "user", "content": "Hi"}], tools=None, add_generation_prompt=True)
    assert plain == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_prompt_does_not_show_the_ids_of_tool_calls() -> None:
    """The engine makes them up: were they shown, no state would ever repeat within a group."""
    from make_trip import RECIPE, conversation

    tokenizer, messages = AutoTokenizer.from_pretrained(FOLDER / "trip" / "policy"), conversation(0, 0)
    renamed = json.loads(json.dumps(messages).replace('"call_', '"other_'))
    assert renamed != messages
    assert RECIPE.shown.render(tokenizer, renamed) == RECIPE.shown.render(tokenizer, messages)
