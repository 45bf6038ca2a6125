"""The tiny policies: the shipped checkpoints can do what is asked, and would rather not."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

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
