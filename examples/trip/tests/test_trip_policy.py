"""The tiny policy: states are token-identical, it can copy, and its first call is anybody's guess."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from behaviours import (
    SHARES,
    Message,
    answer,
    ask_airline,
    ask_refund,
    behave,
    conversation,
    lesson,
    search_airline,
    subtract,
)
from make_trip_policy import DEMONSTRATIONS, SHAPE
from transformers import AutoModelForCausalLM, AutoTokenizer
from trip_tools import MOST_CALLS
from trips import Split, traveller, trip

POLICY = Path(__file__).parents[1] / "policy"
CONVERSATIONS = [conversation(seed, index) for seed in (0, 9) for index in range(100)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(POLICY)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(POLICY)


def test_a_prompt_does_not_show_the_ids_of_tool_calls(tokenizer: Any) -> None:
    """The engine makes them up: were they shown, no state would ever repeat within a group."""
    messages = CONVERSATIONS[0]
    renamed = json.loads(json.dumps(messages).replace('"call_', '"other_'))
    assert renamed != messages
    assert DEMONSTRATIONS.render(tokenizer, renamed) == DEMONSTRATIONS.render(tokenizer, messages)


def test_prompts_and_replies_are_short(tokenizer: Any) -> None:
    for messages in CONVERSATIONS:
        ids, said = DEMONSTRATIONS.encode(tokenizer, messages)
        assert len(ids) <= 220
        assert sum(said) <= 22 * sum(message["role"] == "assistant" for message in messages)


def test_the_checkpoint_is_what_the_readme_says(tokenizer: Any, model: Any) -> None:
    config = model.config
    assert config.vocab_size == len(tokenizer) == SHAPE.vocabulary
    assert config.hidden_size // config.num_attention_heads == 32
    assert (POLICY / "model.safetensors").stat().st_size < 1_500_000


def test_demonstrations_are_as_often_as_the_shares_say() -> None:
    tools = Counter(
        call["function"]["name"]
        for message in (conversation(3, index)[2] for index in range(2000))
        for call in message["tool_calls"]
    )
    assert tools["memory"] / 2000 == pytest.approx(0.32, abs=0.04)
    assert tools["search"] / 2000 == pytest.approx(0.40, abs=0.04)
    assert tools["calculator"] / 2000 == pytest.approx(0.28, abs=0.04)
    assert all(sum(shares.values()) == pytest.approx(1) for shares in SHARES.values())


def test_a_lesson_makes_no_mistake() -> None:
    for index in range(300):
        shown = lesson(0, index)
        assert shown[-1]["content"].endswith(f" = {trip(traveller(Split.TRAIN, -1, index)).result}.")
        assert sum(message["role"] == "assistant" for message in shown) == MOST_CALLS


def test_few_demonstrations_succeed_and_none_that_asks_something_else_first() -> None:
    shown = [(trip(traveller(Split.TRAIN, -1, index)), conversation(0, index)) for index in range(2000)]
    right = [messages for asked, messages in shown if str(messages[-1]["content"]).endswith(f"= {asked.result}.")]
    assert 0.1 < len(right) / len(shown) < 0.25
    assert {messages[2]["tool_calls"][0]["function"]["name"] for messages in right} == {"memory"}


def first_tool_shares(tokenizer: Any, model: Any, index: int) -> dict[str, float]:
    """How likely each tool is to be the first one asked."""
    asked = trip(traveller(Split.EVAL, 0, index))
    prompt: list[Message] = behave(asked, lambda _: subtract)[:2]
    text = DEMONSTRATIONS.render(tokenizer, prompt, add_generation_prompt=True)
    head = tokenizer.encode(text, add_special_tokens=False)
    shares = {}
    for name in ("memory", "search", "calculator"):
        said = tokenizer.encode(f'<tool_call>\n{{"name": "{name}",', add_special_tokens=False)
        with torch.inference_mode():
            logprobs = model(input_ids=torch.tensor([head + said])).logits[0].log_softmax(-1)
        at = range(len(head) - 1, len(head) + len(said) - 1)
        shares[name] = sum(logprobs[place, token] for place, token in zip(at, said, strict=True)).exp().item()
    return shares


def test_before_training_each_tool_is_asked_first_about_as_often(tokenizer: Any, model: Any) -> None:
    found = [first_tool_shares(tokenizer, model, index) for index in range(24)]
    mean = {name: sum(shares[name] for shares in found) / len(found) for name in found[0]}
    assert sum(mean.values()) > 0.97
    assert all(0.2 < share < 0.47 for share in mean.values())


def test_the_policy_can_copy_what_it_was_told(tokenizer: Any, model: Any) -> None:
    """On held-out trips the likeliest token is the right one wherever a fact has to be repeated."""
    right = []
    for index in range(60):
        asked = trip(traveller(Split.EVAL, 0, index))
        todo = iter((ask_airline, search_airline, ask_refund, subtract, answer))
        ids, said = DEMONSTRATIONS.encode(tokenizer, behave(asked, lambda _, todo=todo: next(todo)))
        with torch.inference_mode():
            likeliest = [0, *model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()]
        facts = {
            f" {asked.city}",
            f" {asked.airline}",
            *(str(number)[0] for number in (asked.fare, asked.refund, asked.result)),
        }
        places = [at for at, token in enumerate(ids) if said[at] and tokenizer.decode([token]) in facts]
        assert len(places) == 5
        right += [likeliest[place] == ids[place] for place in places]
    assert sum(right) / len(right) > 0.98
