"""Fails unless a run's summary.json shows that the reward rose, greedy and sampled, and that every token was exact.

python tests/repository/assert_reward_rose.py runs/calc/summary.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LEAST_RISE = 0.2


def main() -> None:
    """Print both rewards; exit with 1 if one did not rise enough, or a trained token is not as it was sampled."""
    summary = json.loads(Path(sys.argv[1]).read_text())
    reward, rose = summary["reward"], True
    for mode in ("greedy", "sampled"):
        before, after = reward["before"][mode], reward["after"][mode]
        rose = rose and after >= before + LEAST_RISE
        print(f"reward, {mode}: {before:.3f} before, {after:.3f} after")
    if not rose:
        sys.exit(f"The reward was to rise by {LEAST_RISE} at least.")
    if summary["trained_tokens"]["exact_share"] != 1:
        sys.exit(f"Not every trained token is proved to be what was sampled: {summary['trained_tokens']['proved']}")


if __name__ == "__main__":
    main()
