"""The shipped corpus and questions, and files in MuSiQue's own format."""

from __future__ import annotations

from pathlib import Path

import pytest
from musique import Question, read_questions
from retrieval import CORPUS, Index, Passage, read_passages

DATA = CORPUS.parent
SAMPLE = Path(__file__).parent / "musique_ans_v1.0_sample.jsonl"


@pytest.fixture(scope="module")
def index() -> Index:
    return Index.build(list(read_passages(CORPUS)))


@pytest.fixture(scope="module", params=["train", "eval"])
def questions(request: pytest.FixtureRequest) -> list[Question]:
    return read_questions(DATA / f"{request.param}.jsonl.gz")


def test_the_search_finds_every_gold_passage(questions: list[Question], index: Index) -> None:
    for asked in questions[:200]:
        for step in asked.question_decomposition:
            gold = asked.paragraphs[step.paragraph_support_idx or 0]
            relation = step.question.partition(" >> ")[2]
            assert index.best(f"{relation} of {gold.title}", 1) == [Passage(gold.title, gold.paragraph_text)]


def test_what_is_held_out_is_never_asked_about_in_training() -> None:
    def entities(name: str) -> set[str]:
        return {
            asked.paragraphs[step.paragraph_support_idx or 0].title
            for asked in read_questions(DATA / f"{name}.jsonl.gz")
            for step in asked.question_decomposition
        }

    assert not entities("train") & entities("eval")
    assert len(entities("eval")) > 200


def test_musiques_own_format_is_read_and_what_cannot_be_answered_left_out() -> None:
    [asked] = read_questions(SAMPLE)
    assert asked.answers == ["Cádiz", "Cadiz", "Cádiz, Spain"]
    assert [step.paragraph_support_idx for step in asked.question_decomposition] == [0, 2]
    assert [each.title for each in asked.paragraphs if each.is_supporting] == ["Harbour Lights (film)", "Ada Torres"]


@pytest.mark.parametrize("line", ["{", '{"id": "1"}', "[]"])
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(SAMPLE.read_text() + line + "\n")
    with pytest.raises(ValueError, match="line 3 is no question"):
        read_questions(file)


@pytest.mark.parametrize("line", ["{", '{"title": "A"}', "[]", "3"])
def test_a_line_that_is_no_passage_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "passages.jsonl"
    file.write_text('{"title": "A", "text": "B"}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        list(read_passages(file))
