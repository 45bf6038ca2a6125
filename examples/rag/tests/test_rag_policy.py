"""The tiny policy: it can follow a question to its end on held-out questions, and hardly ever does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from make_rag_policy import DEMONSTRATIONS, NAMES, PHRASES, SHAPE
from musique import Question, read_questions
from retrieval import CORPUS, Index, read_passages
from searches import FLAWLESS, NO_ANSWER, SHARES, Asked, asked, behave, conversation, lesson, written
from transformers import AutoModelForCausalLM, AutoTokenizer

POLICY = Path(__file__).parents[1] / "policy"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(POLICY)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(POLICY)


@pytest.fixture(scope="module")
def held_out() -> list[Asked]:
    index = Index.build(list(read_passages(CORPUS)))
    return [_way(each, index) for each in read_questions(CORPUS.parent / "eval.jsonl.gz")[:60]]


def _way(question: Question, index: Index) -> Asked:
    queries, values, name = [], [], question.question_decomposition[0].question.partition(" >> ")[0]
    for step in question.question_decomposition:
        queries.append(f"{step.question.partition(' >> ')[2]} of {name}")
        values.append(name := step.answer)
    return Asked(question.question, tuple(queries), tuple(values), index)


def test_every_name_of_the_corpus_is_one_token(tokenizer: Any) -> None:
    for name in written():
        assert len(tokenizer.encode(f"of {name}", add_special_tokens=False)) == 1 + len(tokenizer.encode("of"))


def test_conversations_are_short(tokenizer: Any) -> None:
    assert max(len(DEMONSTRATIONS.encode(tokenizer, lesson(0, index))[0]) for index in range(200)) < 200


def test_the_checkpoint_is_what_the_readme_says(tokenizer: Any, model: Any) -> None:
    assert model.config.vocab_size == len(tokenizer) == SHAPE.vocabulary
    assert len({*PHRASES, *NAMES}) == len(PHRASES) + len(NAMES)
    assert (POLICY / "model.safetensors").stat().st_size < 5_000_000


def test_shares_of_behaviour_add_up_and_few_demonstrations_succeed() -> None:
    assert all(sum(shares.values()) == pytest.approx(1) for shares in SHARES.values())
    ends = [(asked(0, index), conversation(0, index)[-1]["content"]) for index in range(1000)]
    assert 0.01 < sum(end == f"Answer: {question.values[-1]}" for question, end in ends) / 1000 < 0.08
    assert Counter(end for _, end in ends).most_common(1)[0][0] == NO_ANSWER


def test_the_policy_can_follow_held_out_questions_and_would_rather_give_up(
    tokenizer: Any, model: Any, held_out: list[Asked]
) -> None:
    """If it searches, it mostly copies the right names; its likeliest first reply nearly always gives up."""
    right = replies = given_up = 0
    for question in held_out:
        ids, said = DEMONSTRATIONS.encode(tokenizer, behave(question, lambda situation: FLAWLESS[situation]))
        with torch.inference_mode():
            likeliest = [0, *model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()]
        first = said.index(True)
        given_up += tokenizer.decode([likeliest[first]]).strip() == NO_ANSWER
        text = [tokenizer.decode([token]) for token in ids]
        places = [
            at
            for at in range(first, len(ids))
            if said[at] and text[at].strip() in (*question.values, question.queries[0].partition(" of ")[2])
        ]
        right += sum(likeliest[at] == ids[at] for at in places)
        replies += len(places)
    assert given_up >= 0.9 * len(held_out)
    assert replies >= 3 * len(held_out)
    assert right / replies > 0.95
