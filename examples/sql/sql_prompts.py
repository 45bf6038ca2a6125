"""The prompts of writer, checker and rewriter. They are short: each token costs time on a CPU."""

from __future__ import annotations

from typing import TypedDict

WRITE = "Write one SQLite query that answers the question."
CHECK = "Does the query answer the question? Say ok, or what is wrong."
REWRITE = "Correct the SQLite query."


class State(TypedDict, total=False):
    """The knowledge of the three."""

    database: str
    question: str
    schema: str
    query: str
    outcome: str
    remark: str
    rewrites: int


def to_writer(state: State) -> str:
    return f"{state['schema']}\nquestion : {state['question']}"


def to_checker(state: State) -> str:
    return f"question : {state['question']}\nquery : {state['query']}\nresult : {state['outcome']}"


def to_rewriter(state: State) -> str:
    """The rewriter's prompt; of a result it sees only an error."""
    error = f"result : {state['outcome']}\n" if state["outcome"].startswith("error") else ""
    return f"{to_writer(state)}\nquery : {state['query']}\n{error}remark : {state['remark']}"
