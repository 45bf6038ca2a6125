"""Make the tiny policy that the example trains:

python examples/rag/make_rag_policy.py --out examples/rag/policy
"""

from __future__ import annotations

import sys
from pathlib import Path

from search_tool import INSTRUCTIONS
from searches import NO_ANSWER, TOOLS, conversation, lesson, written
from worlds import KINDS

sys.path.append(str(Path(__file__).parents[1]))
from imitation import Demonstrations, Shape, make

PHRASES = (
    '<tool_call>\n{"name": "search", "arguments": {"query": "',
    '"}}\n</tool_call>',
    f"{INSTRUCTIONS}\n<tools>\nsearch(query)\n</tools>",
    NO_ANSWER,
    "What is the",
    " of the",
    *(f": A country whose {each} is" for each in ("capital", "calling code", "currency")),
    ": A city in",
    *(f": A {each} of" for each in KINDS),
    ": A currency whose code is",
    ": A chemical element whose discovery country is",
)
"""One token each: what is always the same."""
NAMES = tuple(f" {name}" for name in written())
"""Every name of the corpus is one token too: a tiny policy can copy single tokens."""
DEMONSTRATIONS = Demonstrations(conversation, TOOLS, lesson, PHRASES, NAMES)
SHAPE = Shape(
    vocabulary=len(PHRASES) + len(NAMES) + 400,
    hidden=96,
    layers=3,
    heads=4,
    kv_heads=4,
    initializer_range=0.1,
    copies=True,
)

if __name__ == "__main__":
    make(DEMONSTRATIONS, SHAPE, steps=1200, batch=16, learning_rate=3e-3, beta2=0.98, reading=5 / 6)
