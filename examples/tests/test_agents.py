"""The examples' agents against a scripted model: what they send, what they answer, and when they give up.

The policies are warmed up on demonstrations, which must be exactly what the agents send.
"""

from __future__ import annotations

import importlib
import json
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from recipes import Message, uses

EXAMPLES = Path(__file__).parents[1]
Answer = Callable[[dict[str, str]], Awaitable[str]]
ENTRIES = {
    "calc": "agent:solve",
    "math": "math_agent:solve",
    "rag": "researcher:answer",
    "sql": "text_to_sql:answer",
    "trip": "assistant:help_traveller",
    "smollm": "adder:solve",
    "smollm/calculator": "tool_agent:solve",
}
TRIP = {"question": "How much is left of the fare?", "traveller": "train/0/0"}


@pytest.fixture
def agent(model: Any) -> Iterator[Callable[[str], Answer]]:
    """`agent(example)`: its entry, imported when the scripted model's address is in the environment."""
    from agents import set_tracing_disabled

    def entry(example: str) -> Answer:
        module, _, function = ENTRIES[example].partition(":")
        answer: Answer = getattr(importlib.import_module(module), function)
        return answer

    set_tracing_disabled(True)
    yield entry
    set_tracing_disabled(False)


def calls(tool: str, **arguments: str) -> Message:
    return uses(tool, json.dumps(arguments), "")[0]


def tool_messages(model: Any) -> list[str]:
    """The results of tools in the last request."""
    return [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]


@pytest.mark.parametrize(
    ("example", "replies", "results"),
    [
        ("calc", [calls("calculator", expression="12*7")], ["84"]),
        ("calc", [calls("calculator", expression="12 times 7")], ["Error: cannot evaluate '12 times 7'"]),
        ("math", [calls("calculator", expression="12*7"), calls("calculator", expression="84-4")], ["84", "80"]),
        ("math", [calls("calculator", expression="a*3")], ["Error: write one operation with two numbers"]),
        ("math", [calls("calculator", expression="3/0")], ["Error: division by zero"]),
        ("smollm/calculator", [calls("calculator", expression="4 + 3")], ["7"]),
        (
            "trip",
            [calls("memory", key="seat"), calls("calculator", expression="no numbers")],
            ["[]", "Error: no numbers"],
        ),
    ],
)
async def test_the_model_reads_results_and_errors_of_its_tools(
    agent: Any, model: Any, example: str, replies: list[Any], results: list[str]
) -> None:
    model.replies = [*replies, "The answer is 80."]
    assert await agent(example)({"question": "What is it?", "traveller": "train/0/0"}) == "The answer is 80."
    assert tool_messages(model) == results


@pytest.mark.parametrize(
    ("example", "tool", "argument", "replies"),
    [
        ("calc", "calculator", "expression", 5),
        ("math", "calculator", "expression", 5),
        ("rag", "search", "query", 6),
        ("trip", "memory", "key", 5),
        ("smollm/calculator", "calculator", "expression", 3),
    ],
)
async def test_an_agent_that_goes_round_in_circles_gives_up(
    agent: Any, model: Any, example: str, tool: str, argument: str, replies: int
) -> None:
    model.replies = [calls(tool, **{argument: "1+1"})]
    answer = await agent(example)({"question": "What is 1+1?", "traveller": "train/0/0"})
    assert not any(c.isdigit() for c in answer)
    assert "Answer:" not in answer
    assert len(model.requests) == replies


async def test_the_traveller_is_known_to_the_tools_alone(agent: Any, model: Any) -> None:
    model.replies = ["You pay 0."]
    await agent("trip")(TRIP)
    assert TRIP["traveller"] not in json.dumps(model.requests[0])


def ships() -> dict[str, str]:
    from sql_schemas import DATABASES

    return {"question": "How many ship have flag 'Red' ?", "database": str(DATABASES / "harbours.sqlite")}


@pytest.mark.parametrize(
    ("replies", "answer", "agents"),
    [
        (["SELECT count(*) FROM ship", "ok"], "SELECT count(*) FROM ship", "WC"),
        (["Here it is:\n```sql\nSELECT 1\n```", "OK."], "SELECT 1", "WC"),
        (["SELECT x FROM ship", "x is no column", "SELECT flag FROM ship", "ok"], "SELECT flag FROM ship", "WCRC"),
        (["SELECT 1", "no", "SELECT 2", "no", "SELECT 3"], "SELECT 3", "WCRCR"),
    ],
)
async def test_the_writer_is_checked_and_rewritten_twice_at_most(
    agent: Any, model: Any, replies: list[str], answer: str, agents: str
) -> None:
    from sql_prompts import CHECK, REWRITE, WRITE

    model.replies = replies
    assert await agent("sql")(ships()) == answer
    assert model.first_messages == [{"W": WRITE, "C": CHECK, "R": REWRITE}[letter] for letter in agents]


async def test_checker_and_rewriter_see_result_error_and_remark(agent: Any, model: Any) -> None:
    model.replies = ["SELECT x FROM ship", "x is no column", "SELECT count(*) FROM ship", "ok"]
    await agent("sql")(ships())
    prompts = [request["messages"][1]["content"] for request in model.requests]
    with closing(sqlite3.connect(ships()["database"])) as connection:
        [(count,)] = connection.execute("SELECT count(*) FROM ship")
    assert "table ship : ship_id harbour_id captain length_cm flag" in prompts[0]
    assert "query : SELECT x FROM ship\nresult : error: no such column: x\nremark : x is no column" in prompts[2]
    assert f"result : 1 rows, first {count}" in prompts[3]


def calc_demonstrations() -> Iterator[tuple[dict[str, str], list[Any], list[Any]]]:
    from make_calc import TOOLS, Behaviour, behave
    from problems import Split, problem

    task = problem(Split.TRAIN, 0, 0)
    for behaviour in (Behaviour.SOLVE, Behaviour.WRITE_WORDS):
        yield {"question": task.question}, behave(behaviour, task), TOOLS


def math_demonstrations() -> Iterator[tuple[dict[str, str], list[Any], list[Any]]]:
    from make_math import FLAWLESS, TOOLS, Choice, Situation, behave
    from math_problems import Split, problem

    for index in range(6):
        task = problem(Split.TRAIN, 0, index)
        yield {"question": task.question}, behave(task, lambda situation: next(iter(FLAWLESS[situation]))), TOOLS
        slip = behave(task, lambda situation: Choice.SLIP if situation is Situation.ASKED else Choice.GUESS)
        yield {"question": task.question}, slip, TOOLS


def trip_demonstrations() -> Iterator[tuple[dict[str, str], list[Any], list[Any]]]:
    from make_trip import Choice, behave
    from trip_tools import TOOLS
    from trips import trip

    task = trip(TRIP["traveller"])
    choices = iter((Choice.ASK_AIRLINE, Choice.SEARCH_AIRLINE, Choice.ASK_REFUND, Choice.SUBTRACT, Choice.ANSWER))
    yield {**TRIP, "question": task.question}, behave(task, lambda _: next(choices)), TOOLS


def rag_demonstrations() -> Iterator[tuple[dict[str, str], list[Any], list[Any]]]:
    from make_rag import TOOLS, Asked, Choice, behave
    from search_tool import retriever

    question, queries = (
        "What is the capital of the country of Porto Alegre?",
        ("country of Porto Alegre", "capital of Brazil"),
    )
    tools = [{**TOOLS[0], "function": TOOLS[0]["function"] | {"strict": True}}]
    task = Asked(question, queries, ("Brazil", "Brasilia"), retriever.index)
    for choices in (
        [Choice.SEARCH_NEXT, Choice.SEARCH_NEXT, Choice.ANSWER],
        [Choice.SEARCH_WITHOUT_NAME, Choice.SEARCH_NEXT, Choice.SEARCH_AGAIN, Choice.GIVE_UP],
    ):
        moves = iter(choices)
        yield {"question": question}, behave(task, lambda _, moves=moves: next(moves)), tools


@pytest.mark.parametrize(
    ("example", "demonstrations"),
    [
        ("calc", calc_demonstrations),
        ("math", math_demonstrations),
        ("rag", rag_demonstrations),
        ("trip", trip_demonstrations),
    ],
)
async def test_demonstrations_are_what_the_agent_sends(
    agent: Any, model: Any, example: str, demonstrations: Any
) -> None:
    for task_input, shown, tools in demonstrations():
        model.clear()
        model.replies = [message for message in shown if message["role"] == "assistant"]
        assert await agent(example)(task_input) == shown[-1]["content"]
        request = model.requests[-1]
        messages = [{key: value for key, value in m.items() if key != "name"} for m in request["messages"]]
        assert messages == shown[:-1]
        assert request["tools"] == tools


async def test_demonstrations_of_queries_have_the_parts_of_what_langchain_sends(agent: Any, model: Any) -> None:
    from make_sql import MIXED, demonstrated

    def parts(text: str) -> set[str]:
        return {part for part in ("table ", "question :", "query :", "result :", "remark :") if part in text}

    model.replies = ["SELECT flag FROM ship", "wrong columns", "SELECT 1", "ok"]
    await agent("sql")(ships())
    shown = {demo[0]["content"]: demo for demo in (demonstrated(str(i), MIXED) for i in range(40))}
    assert shown.keys() == set(model.first_messages)
    for request in model.requests:
        demo = shown[request["messages"][0]["content"]]
        assert [message["role"] for message in request["messages"]] == [message["role"] for message in demo[:-1]]
        assert "tools" not in request
        for sent, demonstrated_ in zip(request["messages"], demo[:-1], strict=True):
            assert parts(sent["content"]) >= parts(demonstrated_["content"]) - {"result :"}
