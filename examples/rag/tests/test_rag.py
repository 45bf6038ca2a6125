"""The shipped corpus and questions, files in MuSiQue's own format, and the index with the service that shares it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from musique import Question, read_questions
from retrieval import CORPUS, Index, Local, Passage, Remote, open_retriever, read_passages
from serve_index import LONGEST_QUERY, service
from testing_aids import run_command

DATA = CORPUS.parent
SAMPLE = Path(__file__).parent / "musique_ans_v1.0_sample.jsonl"


@pytest.fixture(scope="module")
def index() -> Index:
    return Index.build(list(read_passages(CORPUS)))


@pytest.fixture(scope="module", params=["train", "eval"])
def questions(request: pytest.FixtureRequest) -> list[Question]:
    return read_questions(DATA / f"{request.param}.jsonl.gz")


def test_the_search_finds_every_gold_passage(questions: list[Question], index: Index) -> None:
    for question in questions[:200]:
        for step in question.question_decomposition:
            gold = question.paragraphs[step.paragraph_support_idx or 0]
            relation = step.question.partition(" >> ")[2]
            assert index.best(f"{relation} of {gold.title}", 1) == [Passage(gold.title, gold.paragraph_text)]


def test_what_is_held_out_is_never_asked_about_in_training() -> None:
    def entities(name: str) -> set[str]:
        return {
            question.paragraphs[step.paragraph_support_idx or 0].title
            for question in read_questions(DATA / f"{name}.jsonl.gz")
            for step in question.question_decomposition
        }

    assert not entities("train") & entities("eval")
    assert len(entities("eval")) > 200


def test_musiques_own_format_is_read_and_what_cannot_be_answered_left_out() -> None:
    [question] = read_questions(SAMPLE)
    assert question.answers == ["Cádiz", "Cadiz", "Cádiz, Spain"]
    assert [step.paragraph_support_idx for step in question.question_decomposition] == [0, 2]
    assert [p.title for p in question.paragraphs if p.is_supporting] == ["Harbour Lights (film)", "Ada Torres"]


@pytest.mark.parametrize(
    ("read", "first", "line"),
    [
        *((read_questions, SAMPLE.read_text().splitlines()[0], line) for line in ("{", '{"id": "1"}', "[]")),
        *((read_passages, '{"title": "A", "text": "B"}', line) for line in ("{", '{"title": "A"}', "[]", "3")),
    ],
)
def test_a_line_that_is_no_question_or_passage_is_named(tmp_path: Path, read: Any, first: str, line: str) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(f"{first}\n{line}\n")
    with pytest.raises(ValueError, match="line 2"):
        list(read(file))


EXAMPLE = Path(__file__).parents[1]
BRAZIL = "A country whose capital is Brasilia."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index folder of the shipped corpus, made by the script."""
    out = tmp_path_factory.mktemp("rag") / "index"
    output = run_command(sys.executable, EXAMPLE / "build_index.py", CORPUS, "--out", out)
    assert re.match(r"\d{4} passages in ", output)
    return out


@pytest.fixture
def transport(index: Index) -> httpx2.ASGITransport:
    return httpx2.ASGITransport(service(Local(index)))


async def test_a_folder_and_the_service_find_what_the_index_in_memory_finds(
    folder: Path, index: Index, transport: httpx2.ASGITransport
) -> None:
    remote = Remote("http://service", transport)
    for query in ("capital of Brazil", "country of Porto Alegre", "nothing-of-the-kind", ""):
        expected = index.best(query, 3)
        assert await open_retriever(str(folder)).search(query, 3) == expected
        assert await remote.search(query, 3) == expected
    assert BRAZIL in index.best("capital of Brazil", 1)[0].text


@pytest.mark.parametrize("body", ["", "{}", '{"query": "x", "k": 0}', '{"query": "' + "x" * (LONGEST_QUERY + 1) + '"}'])
async def test_the_service_refuses_what_is_no_search(transport: httpx2.ASGITransport, body: str) -> None:
    async with httpx2.AsyncClient(transport=transport, base_url="http://service") as http:
        assert (await http.post("/search", content=body)).status_code == 422
        assert (await http.get("/health")).json()["passages"] > 3000


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    """Where the script serves the index."""
    command = [sys.executable, str(EXAMPLE / "serve_index.py"), "--index", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        yield served.stdout.readline().split()[-1]
        served.terminate()


async def test_the_script_serves_an_index(address: str) -> None:
    [passage] = await open_retriever(address).search("capital of Brazil", 1)
    assert BRAZIL in passage.text
