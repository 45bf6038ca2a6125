"""An environment with tools, as packages for verifiers 0.1 are written."""

import json

import verifiers as vf
from datasets import Dataset

PRICES = {"apple": 3, "pear": 4}


def price(item: str) -> int:
    """Look up a price.

    Args:
        item: The name of the item.
    """
    print("A tool may print.")
    return PRICES[item]


async def add(numbers: list[int]) -> int:
    """Add numbers."""
    return sum(numbers)


def is_right(completion, answer) -> float:
    return float(completion[-1]["content"].strip() == answer)


def looks_up(completion) -> float:
    """The share of the answers' prices that were looked up, by verifiers' own messages."""
    calls = [
        call for message in completion if isinstance(message, vf.AssistantMessage) for call in message.tool_calls or []
    ]
    asked = {json.loads(call.arguments)["item"] for call in calls if call.name == "price"}
    return len(asked & PRICES.keys()) / len(PRICES)


def load_environment(kind: str = "tools", **options) -> vf.Environment:
    prompt = [
        {"role": "system", "content": "Use the tools."},
        {"role": "user", "content": "What do an apple and a pear cost?"},
    ]
    rows = Dataset.from_list([{"prompt": prompt, "answer": "7"}])
    if kind == "group":
        return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[compares]))
    rubric = vf.Rubric(funcs=[is_right, looks_up], weights=[1.0, 0.5])
    return KINDS[kind](dataset=rows, rubric=rubric, tools=[price, add], **options)


def compares(completions) -> list[float]:
    return [float(len(completion)) for completion in completions]


class Stateful(vf.StatefulToolEnv):
    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return tool_args


class Talks(vf.ToolEnv):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="Go on.")]


class Plain(vf.ToolEnv):
    pass


KINDS = {"tools": vf.ToolEnv, "plain": Plain, "stateful": Stateful, "talks": Talks}
