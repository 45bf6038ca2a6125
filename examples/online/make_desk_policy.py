"""Make the tiny policy of the travel desk, in a minute or two on one core:

python examples/online/make_desk_policy.py --out examples/online/policy
"""

from __future__ import annotations

import sys
from pathlib import Path

from desk import TOOLS
from habits import conversation, lesson

sys.path.append(str(Path(__file__).parents[1]))
from imitation import Demonstrations, Shape, make

DEMONSTRATIONS = Demonstrations(conversation, TOOLS, lesson)
SHAPE = Shape(vocabulary=480, hidden=64, layers=2, heads=2, kv_heads=2, initializer_range=0.125)

if __name__ == "__main__":
    make(DEMONSTRATIONS, SHAPE, steps=1000, batch=16, learning_rate=3e-3, beta2=0.98)
