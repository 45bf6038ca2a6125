"""Questions of several hops in the format of MuSiQue (arXiv 2108.00573): one JSON object a line."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from retrieval import read_lines


class Paragraph(BaseModel):
    """One of the passages that come with a question."""

    model_config = ConfigDict(frozen=True)

    idx: int
    title: str
    paragraph_text: str
    is_supporting: bool = False


class Step(BaseModel):
    """One hop; `#1` in its question stands for the answer of the first."""

    model_config = ConfigDict(frozen=True)

    id: int | str
    question: str
    answer: str
    paragraph_support_idx: int | None = None


class Question(BaseModel):
    """A line of a MuSiQue file. Of the test set, whose answers are secret, it has no more than the question."""

    model_config = ConfigDict(frozen=True)

    id: str
    question: str
    question_decomposition: list[Step] = []
    answer: str = ""
    answer_aliases: list[str] = []
    answerable: bool = True
    paragraphs: list[Paragraph] = []

    @property
    def answers(self) -> list[str]:
        return [self.answer, *self.answer_aliases]


def read_questions(path: Path) -> list[Question]:
    """The answerable questions of a file, gzipped or not. ValueError names a line that is none."""
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            found.append(Question.model_validate_json(line))
        except ValidationError as error:
            raise ValueError(f"{path}, line {number} is no question of MuSiQue's: {error}") from error
    return [each for each in found if each.answerable and each.answer]
