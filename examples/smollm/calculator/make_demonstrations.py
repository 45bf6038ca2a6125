"""Write `demonstrations.jsonl`: training's sums, worked out with the calculator, for the warm-up of `warm_up.toml`.

python examples/smollm/calculator/make_demonstrations.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sum_tool import TOOLS

sys.path.append(str(Path(__file__).parents[1]))
from sums import Split, sums

COUNT = 96
FILE = Path(__file__).with_name("demonstrations.jsonl")


def demonstration(index: int) -> dict[str, Any]:
    """A conversation as `agl train --from` takes it."""
    task = sums(index, 0, split=Split.TRAIN)
    question, result = task.input["question"], task.metadata["result"]
    expression = question.rsplit(": ", 1)[1].removesuffix(" =")
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": result},
        {"role": "assistant", "content": f"The answer is {result}."},
    ]
    return {"messages": messages, "tools": TOOLS, "id": task.id}


if __name__ == "__main__":
    FILE.write_text("".join(f"{json.dumps(demonstration(index))}\n" for index in range(COUNT)))
