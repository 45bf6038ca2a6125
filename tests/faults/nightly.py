"""`make faults`: storms until AGL_FAULT_KILLS kills are done, and a table of the results.

Every storm has a folder and a seed of its own, made of AGL_FAULT_SEED. What is done is kept in runs/faults-SEED.jsonl:
with the same seed, an interrupted series goes on where it was. No storm is begun after AGL_FAULT_MINUTES. The folder of
a storm that failed is kept, and the exit status is 1 then.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from .fault_run import TinyRun
from .fault_storm import drawn_settings, storm

KILLS_PER_STORM = 10
FAILED = "failed"
SURVIVED = "nothing lost, nothing twice, trained to the end"


def main() -> int:
    kills = int(os.environ.get("AGL_FAULT_KILLS", "200"))
    minutes = float(os.environ.get("AGL_FAULT_MINUTES", "120"))
    seed = int(os.environ.get("AGL_FAULT_SEED") or random.SystemRandom().randrange(10**6))
    series = Path("runs") / f"faults-{seed}"
    print(f"AGL_FAULT_SEED={seed}: {kills} kills, {minutes:g} minutes at most; what is done is in {series}.jsonl")
    results = series.with_suffix(".jsonl")
    results.parent.mkdir(exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    while _kills(results) < kills and time.monotonic() < deadline:
        number = len(_read(results))
        wanted = min(KILLS_PER_STORM, kills - _kills(results))
        result = _one_storm(series / f"storm-{number:03d}", f"{seed}-{number}", wanted)
        with results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"storm {number}: {len(result['killed'])} kills, {result['outcome']}", flush=True)
    done = _read(results)
    print(_table(Counter((victim, each["outcome"]) for each in done for victim in each["killed"])))
    if _kills(results) < kills:
        print(f"The time is up. To go on: AGL_FAULT_SEED={seed} AGL_FAULT_KILLS={kills} make faults")
    return int(any(each["outcome"] == FAILED for each in done))


def _one_storm(place: Path, seed: str, kills: int) -> dict[str, Any]:
    """A storm in a new folder, which is removed if all is well."""
    shutil.rmtree(place, ignore_errors=True)
    chance, killed, outcome = random.Random(seed), [], SURVIVED
    run = TinyRun(place.absolute(), **drawn_settings(chance))
    try:
        for victim in storm(run, chance, kills):
            killed.append(victim)
    except Exception:
        outcome = FAILED
        traceback.print_exc()
        print(f"What was left of it is in {place}.")
    finally:
        run.stop()
    if outcome == SURVIVED:
        shutil.rmtree(place)
    return {"seed": seed, "killed": killed, "outcome": outcome}


def _table(outcomes: Counter[tuple[str, str]]) -> str:
    """How often what was killed, and what came of the storms in which that was."""
    rows = [("killed", "times", "outcome")]
    rows += [(victim, str(times), outcome) for (victim, outcome), times in sorted(outcomes.items())]
    rows += [("all", str(outcomes.total()), "")]
    return "\n".join(f"{victim:<20}{times:>6}  {outcome}" for victim, times, outcome in rows)


def _read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def _kills(results: Path) -> int:
    return sum(len(each["killed"]) for each in _read(results))


if __name__ == "__main__":
    sys.exit(main())
