"""The stock evaluators and AIR: what they find in an episode, and how a run meets them; the page's own tables."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core import kinds
from agl_core.errors import ConfigError
from agl_core.types import Ending, Episode, Mode, Task
from agl_rewards import exact_match, last_number, numeric_match, regex_format, token_f1, word_f1

from . import conftest as make

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
WORDS = st.text(st.characters(exclude_categories=["Nd", "Nl", "No", "Cs"], exclude_characters="-+−.,eE"))


def episode(returned: Any, /, **metadata: Any) -> Episode:
    task = Task("t1", "a question", metadata=metadata)
    return Episode("r1", 0, "g1", 0, task, Mode.TRAIN, Ending.FINISHED, (), result=returned)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", 42),
        ("first 1, then 2", 2),
        ("1,234", 1234),
        ("1,234,567.25 in all", 1234567.25),
        ("1,2345", 2345),
        ("12,34", 34),
        ("-7", -7),
        ("minus: −7", -7),
        ("+7", 7),
        ("34-17", 17),
        ("(3)-17", 17),
        ("x = -17", -17),
        ("$-0.5", -0.5),
        (".5", 0.5),
        ("2.5e-3", 0.0025),
        ("version 1.2.3", 0.3),
        ("7.", 7),
        ("no number", None),
        ("", None),
        (None, None),
        (12, 12),
        (-0.25, -0.25),
        ({"answer": 5}, 5),
        (True, None),
        ("٣", None),
    ],
)
def test_last_number(text: Any, number: float | None) -> None:
    assert last_number(text) == number


@given(number=st.integers(-(10**12), 10**12), before=WORDS, after=WORDS)
def test_an_integer_is_found_among_words_however_it_is_grouped(number: int, before: str, after: str) -> None:
    for shown in (str(number), f"{number:,}"):
        assert last_number(f"{before} {shown} {after}") == number


@given(expected=FINITE, other=FINITE)
def test_numeric_match_is_reflexive_and_symmetric(expected: float, other: float) -> None:
    assert numeric_match(episode(expected, result=expected)) == 1.0
    assert numeric_match(episode(expected, result=other)) == numeric_match(episode(other, result=expected))


def test_numeric_match_tolerance_is_relative_above_one_and_absolute_below() -> None:
    assert numeric_match(episode("1010", result=1000), tolerance=0.01) == 1.0
    assert numeric_match(episode("1011", result=1000), tolerance=0.001) == 0.0
    assert numeric_match(episode("0.009", result=0), tolerance=0.01) == 1.0
    assert numeric_match(episode("0.011", result=0), tolerance=0.01) == 0.0


def test_a_task_without_the_expected_answer_is_an_error_that_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"Task 't1' has no metadata 'result'.*it has answer.*`field`"):
        numeric_match(episode("5", answer="5"))
    with pytest.raises(ConfigError, match=r"'five'.*holds no number"):
        numeric_match(episode("5", result="five"))


def test_exact_match_compares_text_case_and_json_values() -> None:
    assert exact_match(episode("paris", result="Paris")) == 0.0
    assert exact_match(episode({"a": [1]}, result={"a": [1]})) == 1.0
    assert exact_match(episode("5", result=5)) == 0.0
    assert exact_match(episode(1, result=True)) == 0.0
    assert exact_match(episode(None, result="Paris")) == 0.0


def test_regex_format_searches_in_text_and_json() -> None:
    assert regex_format(episode("Answer: 12"), pattern=re.compile(r"^Answer: \d+$")) == 1.0
    assert regex_format(episode("The Answer: 12"), pattern=re.compile(r"^Answer: \d+$")) == 0.0
    assert regex_format(episode({"answer": 12}), pattern=re.compile('"answer": 12')) == 1.0
    assert regex_format(episode(None), pattern=re.compile("^$")) == 1.0


async def test_every_setting_has_an_effect() -> None:
    def rule(name: str, **settings: Any) -> Any:
        return make.rule(kinds.REWARD, name, **settings)

    other = episode("Five is 5.4", result=6, answer="5", also="Five is 5.4")
    assert rule("numeric_match")(other) == 0.0
    assert rule("numeric_match", field="answer")(other) == 0.0
    assert rule("numeric_match", field="answer", tolerance=0.1)(other) == 1.0
    assert rule("exact_match")(other) == 0.0
    assert rule("exact_match", field="also")(other) == 1.0
    assert await rule("regex_format", pattern="^Five")(other) == 1.0
    assert await rule("regex_format", pattern="^Six")(other) == 0.0


@given(
    lengths=st.lists(st.integers(0, 60) | st.none(), max_size=6), limit=st.integers(1, 50), share=st.floats(0.02, 1.0)
)
def test_a_response_near_the_limit_loses_as_in_dapo(lengths: list[int | None], limit: int, share: float) -> None:
    """Equation 13 of arXiv 2503.14476, case by case; None: a call without token ids."""
    buffer = max(1, int(share * limit))
    calls = [make.transition(i, response_ids=None if n is None else range(n)) for i, n in enumerate(lengths)]
    rewards = make.rule(kinds.REWARD, "overlong", limit=limit, buffer=buffer)(make.episode(*calls))
    for call, length in zip(calls, lengths, strict=True):
        if length is None or length <= limit - buffer:
            assert call.key not in rewards
        elif length <= limit:
            assert rewards[call.key] == pytest.approx(((limit - buffer) - length) / buffer)
        else:
            assert rewards[call.key] == -1


def test_a_buffer_above_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="buffer is 11, above limit, 10"):
        make.rule(kinds.REWARD, "overlong", limit=10, buffer=11)(make.episode(make.transition(response_ids=range(3))))


ANSWERS = st.lists(st.sampled_from(["cat", "sat", "mat", "dog"]), max_size=6).map(" ".join)


@given(answer=ANSWERS, expected=ANSWERS)
def test_it_is_symmetric_and_one_only_for_the_same_words(answer: str, expected: str) -> None:
    value = word_f1(answer, expected)
    assert value == word_f1(expected, answer)
    assert 0 <= value <= 1
    assert (value == 1) == (sorted(answer.split()) == sorted(expected.split()))


@pytest.mark.parametrize(
    ("answer", "expected", "value"),
    [
        ("cat cat", "cat", 2 / 3),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("", "", 1.0),
        (" ", "", 1.0),
        ("the", "", 0.0),
        ("", "The", 0.0),
        ("the", "The", 1.0),
        ("A", "B", 0.0),
        ("B", "A", 0.0),
        ("an", "A", 0.0),
        ("A.", "A", 1.0),
        ("", "?!", 0.0),
        ("!", "?", 0.0),
        ("?", "?", 1.0),
        ("U.S.", "us", 1.0),
        ("Zürich", "zürich", 1.0),
    ],
)
def test_examples(answer: str, expected: str, value: float) -> None:
    assert word_f1(answer, expected) == pytest.approx(value)


def test_the_best_of_several_answers_counts_and_the_field_is_chosen() -> None:
    metadata = {"answers": ["dog", "cat", "a big cat"], "result": "dog"}
    assert token_f1(make.episode(result="big cat", metadata=metadata), field="answers") == 1.0
    assert token_f1(make.episode(result="big cat", metadata=metadata)) == 0.0
    assert token_f1(make.episode(result=None, metadata=metadata)) == 0.0
    assert token_f1(make.episode(result=["dog"], metadata=metadata)) == 1.0


PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"


def test_every_reward_table_of_the_page_is_valid() -> None:
    configurations = map(tomllib.loads, re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL))
    tables = [table for config in configurations for table in config.get("rewards", {}).items()]
    assert len(tables) >= 5
    for name, table in tables:
        settings = {key: value for key, value in table.items() if key not in ("rule", "weight")}
        make.rule(kinds.REWARD, table.get("rule", name), **settings)
