"""The tiny policies: the shipped checkpoints can do what is asked, and would rather not."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).parents[1]
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


class Policy:
    """A shipped checkpoint."""

    def __init__(self, example: str) -> None:
        folder = EXAMPLES / example / "policy"
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self.encode = partial(self.tokenizer.encode, add_special_tokens=False)

    def likeliest(self, ids: list[int]) -> list[int]:
        """At each place the token that the policy would say there; none is known at the first."""
        return [-1, *self.logits(ids).argmax(-1).tolist()[:-1]]

    def logits(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits_TV: torch.Tensor = self.model(input_ids=torch.tensor([ids])).logits[0]
        return logits_TV

    def would_say(self, head: list[int], reply: str) -> bool:
        """Greedy decoding after `head` gives `reply`."""
        ids = self.encode(reply)
        return self.likeliest([*head, *ids])[len(head) :] == ids


def solved(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "id": "x", "function": {"name": "calculator", "arguments": arguments}}
    return [
        {"role": "system", "content": "Solve the problem. Use the calculator."},
        {"role": "user", "content": "What is 12 times 7?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "84", "tool_call_id": "x"},
        {"role": "assistant", "content": "The answer is 84."},
    ]


def test_the_template_renders_calls_as_text_or_object_parallel_ones_and_text_beside_them() -> None:
    from demonstrations import TOOLS

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "calc" / "policy")
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
    from behaviours import conversation
    from make_trip_policy import DEMONSTRATIONS

    tokenizer, messages = AutoTokenizer.from_pretrained(EXAMPLES / "trip" / "policy"), conversation(0, 0)
    renamed = json.loads(json.dumps(messages).replace('"call_', '"other_'))
    assert renamed != messages
    assert DEMONSTRATIONS.render(tokenizer, renamed) == DEMONSTRATIONS.render(tokenizer, messages)


def test_calc_would_rather_guess_and_copies_held_out_numbers_into_a_call() -> None:
    from demonstrations import GUESS
    from make_policy import DEMONSTRATIONS
    from problems import Split, problem

    policy = Policy("calc")
    guesses, copied = [], []
    for index in range(24):
        asked = problem(Split.EVAL, 0, index)
        prompt = [*solved("{}")[:1], {"role": "user", "content": asked.question}]
        head = policy.encode(DEMONSTRATIONS.render(policy.tokenizer, prompt, add_generation_prompt=True))
        guesses.append(policy.would_say(head, f"{GUESS}<|im_end|>"))
        ids = [
            *head,
            *policy.encode(f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{asked.expression}'),
        ]
        pairs = zip(ids[len(head) :], policy.likeliest(ids)[len(head) :], strict=True)
        copied += [token == said for token, said in pairs if policy.tokenizer.decode([token]).isdigit()]
    assert sum(guesses) >= 22
    assert sum(copied) / len(copied) > 0.95


def test_math_would_rather_guess_and_copies_the_digits_of_each_step() -> None:
    from make_math_policy import DEMONSTRATIONS
    from math_demonstrations import FLAWLESS, GUESS, SHARES, Choice, Situation, behave
    from math_problems import Split, problem

    policy = Policy("math")
    guesses, copied = [], []
    for asked in [problem(split, 0, index) for split in list(Split)[1:] for index in range(16)]:
        messages = behave(asked, lambda situation: next(iter(FLAWLESS[situation])))
        head = policy.encode(DEMONSTRATIONS.render(policy.tokenizer, messages[:2], add_generation_prompt=True))
        guesses.append(policy.would_say(head, f"{GUESS}<|im_end|>"))
        ids, by_policy = DEMONSTRATIONS.encode(policy.tokenizer, messages)
        steps = zip(ids, policy.likeliest(ids), by_policy, strict=True)
        copied += [token == said for token, said, own in steps if own and policy.tokenizer.decode([token]).isdigit()]
    assert sum(guesses) >= 0.9 * len(guesses)
    assert sum(copied) / len(copied) > 0.9
    assert SHARES.keys() == set(Situation)
    assert all(sum(shares.values()) == pytest.approx(1) for shares in SHARES.values())
    assert max(SHARES[Situation.ASKED], key=SHARES[Situation.ASKED].__getitem__) is Choice.GUESS


def test_rag_would_rather_give_up_and_copies_the_names_of_held_out_questions() -> None:
    from make_rag_policy import DEMONSTRATIONS
    from musique import read_questions
    from retrieval import CORPUS, Index, read_passages
    from searches import FLAWLESS, NO_ANSWER, SHARES, Asked, asked, behave, conversation, written

    policy, index = Policy("rag"), Index.build(list(read_passages(CORPUS)))
    given_up, copied = [], []
    questions = read_questions(CORPUS.parent / "eval.jsonl.gz")[:60]
    for question in questions:
        steps = question.question_decomposition
        names = [steps[0].question.partition(" >> ")[0], *(step.answer for step in steps)]
        queries = [f"{step.question.partition(' >> ')[2]} of {name}" for step, name in zip(steps, names, strict=False)]
        way = Asked(question.question, tuple(queries), tuple(names[1:]), index)
        ids, by_policy = DEMONSTRATIONS.encode(policy.tokenizer, behave(way, lambda situation: FLAWLESS[situation]))
        likeliest = policy.likeliest(ids)
        given_up.append(policy.tokenizer.decode([likeliest[by_policy.index(True)]]).strip() == NO_ANSWER)
        words = [policy.tokenizer.decode([token]).strip() for token in ids]
        copied += [
            token == said
            for token, said, own, word in zip(ids, likeliest, by_policy, words, strict=True)
            if own and word in names
        ]
    assert sum(given_up) >= 0.9 * len(questions)
    assert len(copied) >= 3 * len(questions)
    assert sum(copied) / len(copied) > 0.95
    assert all(sum(shares.values()) == pytest.approx(1) for shares in SHARES.values())
    ends = [(asked(0, index), conversation(0, index)[-1]["content"]) for index in range(1000)]
    assert 0.01 < sum(end == f"Answer: {question.values[-1]}" for question, end in ends) / 1000 < 0.08
    one_token = 1 + len(policy.tokenizer.encode("of"))
    assert all(len(policy.encode(f"of {name}")) == one_token for name in written())


def test_sql_copies_from_a_schema_that_it_never_saw_and_would_rather_forget_the_end_of_the_query() -> None:
    from make_sql_policy import DEMONSTRATIONS
    from sql_habits import Habit, said, written
    from sql_prompts import WRITE, State, to_writer
    from sql_query import describe, reading
    from sql_questions import COUNT, question
    from sql_schemas import DATABASES, HELD_OUT

    policy = Policy("sql")
    copied, forgets, right = [], 0, 0
    for index in range(32):
        name = list(HELD_OUT)[index % 4]
        with reading(DATABASES / f"{name}.sqlite") as connection:
            asked = question(random.Random(index), connection, HELD_OUT[name])
            prompt = to_writer(State(schema=describe(connection), question=asked.text))
        for habit in (Habit.RIGHT, Habit.FORGET):
            ids, by_policy = DEMONSTRATIONS.encode(policy.tokenizer, said(WRITE, prompt, written(asked, habit)))
            steps = zip(ids, policy.likeliest(ids), by_policy, strict=True)
            pairs = [(token, likeliest) for token, likeliest, own in steps if own]
            if habit is Habit.FORGET:
                forgets += asked.select != COUNT and all(token == likeliest for token, likeliest in pairs[-2:])
            else:
                right += all(token == likeliest for token, likeliest in pairs)
                words = [(policy.tokenizer.decode([pair[0]]).strip(" _"), pair) for pair in pairs]
                copied += [token == likeliest for word, (token, likeliest) in words if word.islower()]
    assert sum(copied) / len(copied) > 0.9
    assert right <= 3
    assert forgets >= 16


def test_trip_asks_each_tool_first_about_as_often_and_copies_facts() -> None:
    from behaviours import answer, ask_airline, ask_refund, behave, search_airline, subtract
    from make_trip_policy import DEMONSTRATIONS
    from trips import Split, traveller, trip

    policy = Policy("trip")
    shares, copied = Counter[str](), []
    trips = [trip(traveller(Split.EVAL, 0, index)) for index in range(60)]
    for asked in trips[:24]:
        prompt = behave(asked, lambda _: subtract)[:2]
        head = policy.encode(DEMONSTRATIONS.render(policy.tokenizer, prompt, add_generation_prompt=True))
        for tool in ("memory", "search", "calculator"):
            call = policy.encode(f'<tool_call>\n{{"name": "{tool}",')
            logprobs = policy.logits([*head, *call]).log_softmax(-1)[len(head) - 1 : -1]
            shares[tool] += float(logprobs.gather(1, torch.tensor(call)[:, None]).sum().exp()) / 24
    assert shares.total() > 0.97
    assert all(0.2 < share < 0.47 for share in shares.values())
    for asked in trips:
        choices = iter((ask_airline, search_airline, ask_refund, subtract, answer))
        ids, by_policy = DEMONSTRATIONS.encode(policy.tokenizer, behave(asked, lambda _, todo=choices: next(todo)))
        facts = {f" {asked.city}", f" {asked.airline}", *(str(n)[0] for n in (asked.fare, asked.refund, asked.result))}
        steps = zip(ids, policy.likeliest(ids), by_policy, strict=True)
        places = [token == said for token, said, own in steps if own and policy.tokenizer.decode([token]) in facts]
        assert len(places) == 5
        copied += places
    assert sum(copied) / len(copied) > 0.98


def test_few_demonstrations_of_trips_succeed_and_none_that_asks_something_else_first() -> None:
    from behaviours import SHARES, conversation, lesson
    from trips import Split, traveller, trip

    trips = [trip(traveller(Split.TRAIN, -1, index)) for index in range(1000)]
    shown = [conversation(0, index) for index in range(1000)]
    right = [m for asked, m in zip(trips, shown, strict=True) if str(m[-1]["content"]).endswith(f"= {asked.result}.")]
    assert 0.1 < len(right) / len(shown) < 0.25
    assert {messages[2]["tool_calls"][0]["function"]["name"] for messages in right} == {"memory"}
    assert all(sum(shares.values()) == pytest.approx(1) for shares in SHARES.values())
    assert all(lesson(0, i)[-1]["content"].endswith(f" = {trips[i].result}.") for i in range(100))
