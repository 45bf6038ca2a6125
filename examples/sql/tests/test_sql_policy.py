"""The tiny policy: short prompts, what the README says it is, and that it can write a query but would rather not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from make_sql_policy import DEMONSTRATIONS, SHAPE
from sql_habits import Habit, conversation, said, written
from sql_prompts import WRITE, State, to_writer
from sql_query import describe, reading
from sql_questions import COUNT, question
from sql_schemas import DATABASES, HELD_OUT
from transformers import AutoModelForCausalLM, AutoTokenizer

POLICY = Path(__file__).parents[1] / "policy"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(POLICY)


def test_prompts_are_short(tokenizer: Any) -> None:
    lengths = [len(DEMONSTRATIONS.encode(tokenizer, conversation(0, index))[0]) for index in range(200)]
    assert sum(lengths) / len(lengths) < 100
    assert max(lengths) <= 200


def test_the_checkpoint_is_what_the_readme_says(tokenizer: Any) -> None:
    config = json.loads((POLICY / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["vocab_size"] == len(tokenizer) == 1280
    assert config["hidden_size"] // config["num_attention_heads"] == 32
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert SHAPE.model(tokenizer).num_parameters() == 755_328
    assert (POLICY / "model.safetensors").stat().st_size < 5_000_000


def test_the_writer_can_copy_from_a_schema_that_it_never_saw_and_would_rather_forget(tokenizer: Any) -> None:
    """Given the beginning of a right query, the next token of a name is right; but the likeliest query is too short."""
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    copied = names = forgets = right = 0
    for index in range(32):
        name = list(HELD_OUT)[index % 4]
        with reading(DATABASES / f"{name}.sqlite") as connection:
            asked = question(random.Random(index), connection, HELD_OUT[name])
            state = State(schema=describe(connection), question=asked.text)
        for habit in (Habit.RIGHT, Habit.FORGET):
            ids, by_policy = DEMONSTRATIONS.encode(tokenizer, said(WRITE, to_writer(state), written(asked, habit)))
            with torch.inference_mode():
                likeliest = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
            pairs = [(here, there) for here, there, own in zip(likeliest, ids[1:], by_policy[1:], strict=False) if own]
            if habit is Habit.FORGET:
                forgets += asked.select != COUNT and all(here == there for here, there in pairs[-2:])
            else:
                right += all(here == there for here, there in pairs)
                lower = [pair for pair in pairs if tokenizer.decode([pair[1]]).strip(" _").islower()]
                copied += sum(here == there for here, there in lower)
                names += len(lower)
    assert copied / names > 0.9
    assert right <= 3
    assert forgets >= 16
