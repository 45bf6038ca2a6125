"""An ordinary LangGraph agent that answers questions with SQL. It knows nothing of agl.

A writer writes a query, which runs; a checker looks at what came out; a rewriter corrects the query until the checker
is content or there were enough rounds:

    writer ──▶ checker ──▶ end
                ▲   │
                │   ▼
               rewriter
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from sql_prompts import CHECK, REWRITE, WRITE, State, to_checker, to_rewriter, to_writer
from sql_query import describe, reading, run

MOST_REWRITES = 2

model = ChatOpenAI(model="default")


async def ask(system: str, prompt: str) -> str:
    reply = await model.ainvoke([("system", system), ("user", prompt)])
    return str(reply.text).strip()


def tried(state: State, reply: str) -> dict[str, Any]:
    """The query of a reply, which may be in a block of code, and what comes out when it runs."""
    block = re.search(r"```(?:sql)?\s*(.*?)```", reply, re.DOTALL)
    query = block[1].strip() if block else reply
    with reading(Path(state["database"])) as connection:
        return {"query": query, "outcome": str(run(connection, query))}


async def writer(state: State) -> dict[str, Any]:
    return tried(state, await ask(WRITE, to_writer(state)))


async def checker(state: State) -> dict[str, Any]:
    return {"remark": await ask(CHECK, to_checker(state))}


async def rewriter(state: State) -> dict[str, Any]:
    return {**tried(state, await ask(REWRITE, to_rewriter(state))), "rewrites": state["rewrites"] + 1}


def after_checker(state: State) -> Literal["rewriter", "__end__"]:
    """True if there is something to correct."""
    return END if state["remark"].lower().startswith("ok") else "rewriter"


def after_rewriter(state: State) -> Literal["checker", "__end__"]:
    """True if it may be corrected again."""
    return END if state["rewrites"] == MOST_REWRITES else "checker"


graph = StateGraph(State)
for node in (writer, checker, rewriter):
    graph.add_node(node.__name__, node)
graph.add_edge(START, "writer")
graph.add_edge("writer", "checker")
graph.add_conditional_edges("checker", after_checker)
graph.add_conditional_edges("rewriter", after_rewriter)
agent = graph.compile()


async def answer(task_input: dict[str, str]) -> str:
    """The query for `{"question": …, "database": …}`, a question and an SQLite file."""
    with reading(Path(task_input["database"])) as connection:
        schema = describe(connection)
    return str((await agent.ainvoke({**task_input, "schema": schema, "rewrites": 0}))["query"])
