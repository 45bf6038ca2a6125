"""Make the tiny policy that the example trains, in about twenty minutes on two cores:

python examples/calc/make_policy.py --out examples/calc/policy
"""

from __future__ import annotations

import sys
from pathlib import Path

from demonstrations import TOOLS, conversation

sys.path.append(str(Path(__file__).parents[1]))
from imitation import Demonstrations, Shape, make

DEMONSTRATIONS = Demonstrations(conversation, TOOLS)
SHAPE = Shape(vocabulary=512, hidden=128, layers=4, heads=4, kv_heads=2)

if __name__ == "__main__":
    make(DEMONSTRATIONS, SHAPE, steps=2500)
