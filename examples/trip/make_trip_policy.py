"""Make the tiny policy that the example trains, in two or three minutes on one core:

python examples/trip/make_trip_policy.py --out examples/trip/policy
"""

from __future__ import annotations

import sys
from pathlib import Path

from behaviours import conversation, lesson
from trip_tools import TOOLS

sys.path.append(str(Path(__file__).parents[1]))
from imitation import Demonstrations, Shape, make

DEMONSTRATIONS = Demonstrations(conversation, TOOLS, lesson)
SHAPE = Shape(vocabulary=480, hidden=64, layers=2, heads=2, kv_heads=2, initializer_range=0.125)

if __name__ == "__main__":
    make(DEMONSTRATIONS, SHAPE, steps=1000, batch=16, learning_rate=3e-3, beta2=0.98)
