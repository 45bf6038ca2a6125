"""Make the tiny policy that the example trains:

python examples/sql/make_sql_policy.py --out examples/sql/policy
"""

from __future__ import annotations

import sys
from pathlib import Path

from sql_habits import conversation, lesson
from sql_prompts import CHECK, REWRITE, WRITE

sys.path.append(str(Path(__file__).parents[1]))
from imitation import Demonstrations, Shape, make

DEMONSTRATIONS = Demonstrations(conversation, [], lesson, phrases=(WRITE, CHECK, REWRITE))
SHAPE = Shape(vocabulary=1280, hidden=128, layers=3, heads=4, kv_heads=2, initializer_range=0.088)

if __name__ == "__main__":
    make(DEMONSTRATIONS, SHAPE, steps=2950, batch=32, learning_rate=2.5e-3, beta2=0.98, reading=0.68)
