"""The agent's one tool, and what the agent is told about it."""

from __future__ import annotations

import os

from agents import function_tool
from retrieval import CORPUS, Passage, Retriever, open_retriever

INSTRUCTIONS = "Search step by step. End with Answer: and the answer."
PASSAGES = 2
"""How many passages a search returns. Each of them is read again at every later step."""

retriever: Retriever = open_retriever(os.environ.get("RAG_RETRIEVER", str(CORPUS)))


@function_tool
async def search(query: str) -> str:
    """Find passages about something."""
    return "\n".join(map(listed, await retriever.search(query, PASSAGES)))


def listed(passage: Passage) -> str:
    """How the model sees a passage."""
    return f"- {passage.title}: {passage.text}"
