"""The calculator for sums, and the demonstrations of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sum_tool import TOOLS, use
from transformers import AutoTokenizer
from warm_up import PlainTextDemonstrations, conversation

from agl_torch.conversation import ChatText

TOKENIZER = Path(__file__).parents[2] / "calc" / "policy"
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""SmolLM2's, without its own system message."""


@given(st.lists(st.tuples(st.sampled_from("+-"), st.integers(0, 999)), min_size=1, max_size=8), st.integers(-99, 99))
def test_the_calculator_agrees_with_python(rest: list[tuple[str, int]], first: int) -> None:
    expression = " ".join([str(first), *(f"{sign} {number}" for sign, number in rest)])
    assert use(json.dumps({"expression": expression})) == str(eval(expression))


@pytest.mark.parametrize("expression", ["", "a", "4 +", "4 * 3", "1 2", "9" * 7, "4 + 3 =", 7, None, "١+١"])
def test_what_the_calculator_refuses_is_an_error(expression: Any) -> None:
    assert use(json.dumps({"expression": expression})).startswith("error: ")


def test_demonstrations_are_what_the_engine_shows_and_parses() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = TURNS
    shown = PlainTextDemonstrations(conversation, TOOLS)
    for index in range(20):
        messages = conversation(0, index)
        ids, said = shown.encode(tokenizer, messages)
        replies = tokenizer.decode([i for i, by_policy in zip(ids, said, strict=True) if by_policy]).split("<|im_end|>")
        parsed = ChatText(tokenizer, [tokenizer.eos_token_id]).tool_format.parse(replies[0])
        expression = parsed.calls[0].arguments["expression"]
        assert f" {expression} =" in messages[0]["content"]
        assert use(json.dumps({"expression": expression})) == messages[2]["content"]
        assert replies[1:] == [f"The answer is {messages[2]['content']}.", ""]
