"""Make the tiny policy that the example trains:

python examples/math/make_math_policy.py --out examples/math/policy
"""

from __future__ import annotations

import sys
from pathlib import Path

from autogen_core.tools import FunctionTool
from math_demonstrations import conversation, lesson
from pocket_calculator import SYSTEM_PROMPT, calculator

sys.path.append(str(Path(__file__).parents[1]))
from imitation import Demonstrations, Shape, make

TOOLS = [{"type": "function", "function": FunctionTool(calculator, calculator.__doc__ or "").schema}]
PHRASES = (
    f"system\n{SYSTEM_PROMPT}\n<tools>\ncalculator(expression)\n</tools>",
    "user\n",
    "assistant\n",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "',
    '"}}\n</tool_call>',
    "user\n<tool_response>\n",
    "\n</tool_response>",
    "The answer is ",
    *"()+-*/=",
)
"""What is always written alike is one token, and so is every sign of an expression."""
DEMONSTRATIONS = Demonstrations(conversation, TOOLS, lesson, PHRASES)
SHAPE = Shape(vocabulary=400, hidden=128, layers=4, heads=4, kv_heads=2, initializer_range=0.09, copies=True)

if __name__ == "__main__":
    make(DEMONSTRATIONS, SHAPE, steps=1800, batch=32, learning_rate=2e-3, beta2=0.98, reading=0.8)
