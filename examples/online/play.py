"""Deploys the travel desk with `agl learn`, lets simulated users come, and says what they met.

    python examples/online/play.py learning without         # what travellers want shifts; with and without learning
    python examples/online/play.py inverted                 # feedback is turned round: the gate stops what comes of it
    python examples/online/play.py unseen                   # … in what the gate cannot see: the canary stops it

What is kept of a play is in `results.json` beside this file, one entry for each play and seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

from users import Crowd, Visit, honest

from agl_online.versions import Ledger

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
AGL = Path(sys.executable).with_name("agl")
WINDOW = 100
"""Sessions over which success is averaged."""
RECOVERED = 0.9
"""The share of the success before the shift from which on it has recovered."""
AFTERWARDS = 200
"""Sessions of a play after what it waits for."""
_NEVER = 1_000_000
_HEAD = (
    "| play/seed | before | after the shift | at the end | recovered after | sessions | time | versions |\n"
    + "|---" * 8
    + "|"
)

Result: TypeAlias = dict[str, Any]
"""The record of a play: `right`, a list of 0 and 1 by session; `decisions`, each with the sessions that had ended."""
Thumb: TypeAlias = Callable[[bool, int], float]


@dataclass(frozen=True)
class Play:
    """One deployment and its users."""

    sessions: int
    """At most."""
    shift: int
    settings: tuple[str, ...] = ()
    """Keys of the configuration that are different."""
    until: str | None = None
    """The state that a version has to reach for the play to end, some sessions later."""
    thumb: Callable[[Path], Thumb] = lambda run: honest
    """The users of a run, given its folder."""


def inverted(run: Path) -> Thumb:
    """A bug in the form: every thumb is turned round."""
    return lambda right, number: honest(not right, number)


def inverted_at_first(run: Path) -> Thumb:
    """The same, until it is mended: by chance just when the first version of it becomes a canary."""
    return lambda right, number: honest(right if _became(run, "canary") else not right, number)


_LARGE_STEPS = ("policies.default.optimizer.learning_rate=1e-3",)
_SESSIONS_ALONE = ("learn.offline_share=0",)
"""Offline tasks would hold against feedback that is wrong."""

PLAYS: Mapping[str, Play] = {
    "learning": Play(3000, 600),
    "without": Play(1500, 600, (f"learn.sessions_per_step={_NEVER}",)),
    "inverted": Play(2000, _NEVER, _SESSIONS_ALONE, "rejected", inverted),
    "unseen": Play(
        3000,
        _NEVER,
        # The gate's tasks all name an airline, at which the desk is bad anyway, and no traveller does.
        (*_SESSIONS_ALONE, *_LARGE_STEPS, "tasks.eval.names_airline=true", "learn.gate.tolerance=0.5"),
        "rolled_back",
        inverted_at_first,
    ),
}


def play(name: str, seed: int, sessions: int | None, settings: Sequence[str]) -> Result:
    chosen = PLAYS[name]
    run_name = f"online-{name}-{seed}"
    settings = (*chosen.settings, f"seed={seed}", f"name={run_name}", *settings)
    visits: list[Visit] = []
    began = time.monotonic()
    run = Path("runs") / run_name
    if run.exists():
        sys.exit(f"{run} was played before. Remove it, or choose another --seed.")
    last = sessions or chosen.sessions

    def ended(visit: Visit) -> bool:
        nonlocal last
        visits.append(visit)
        if len(visits) % WINDOW == 0:
            right = mean(visit.right for visit in visits[-WINDOW:])
            print(f"{name}: {len(visits)} sessions in {time.monotonic() - began:.0f} s; right: {right:.2f}", flush=True)
            if chosen.until is not None and _became(run, chosen.until):
                last = min(last, len(visits) + AFTERWARDS)
        return len(visits) < last

    with deployed(run, settings) as url:
        crowd = Crowd(url, _key(run), _key(run, "--feedback"), seed, last, chosen.shift, thumb=chosen.thumb(run))
        asyncio.run(crowd.visit(ended))
    return {
        "seconds": round(time.monotonic() - began),
        "cores": len(os.sched_getaffinity(0)),
        "shift": chosen.shift,
        "right": [int(visit.right) for visit in visits],
        "decisions": [
            {
                "sessions": sum(visit.ended < decision.time for visit in visits),
                "version": decision.step,
                "state": str(decision.state),
                "reason": decision.reason,
            }
            for decision in Ledger(run).decisions()
        ],
    }


@contextmanager
def deployed(run: Path, settings: Sequence[str]) -> Iterator[str]:
    """`agl learn` in a process of its own; the address of its server. It is stopped afterwards."""
    run.parent.mkdir(exist_ok=True)
    log = run.with_suffix(".log")
    command = [str(AGL), "learn", str(HERE / "train.toml"), *(part for s in settings for part in ("--set", s))]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as learning:
        try:
            yield _address(run / "server.json", learning, log)
        finally:
            if learning.poll() is None:
                learning.send_signal(signal.SIGINT)
    if learning.returncode not in (0, 128 + signal.SIGINT):
        sys.exit(f"agl learn ended with status {learning.returncode}: see {log}")


def _address(file: Path, learning: subprocess.Popen[bytes], log: Path) -> str:
    while True:
        try:
            return str(json.loads(file.read_text())["base_url"])
        except (OSError, ValueError):
            if learning.poll() is not None:
                sys.exit(f"agl learn did not begin: see {log}")
            time.sleep(0.1)


def _key(run: Path, *options: str) -> str:
    command = [str(AGL), "sessions", "key", str(run), "desk", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _became(run: Path, state: str) -> bool:
    return any(decision.state == state for decision in Ledger(run).decisions())


def recovered(result: Result) -> int | None:
    """Sessions from the shift to the end of the first window with 0.9 of the success before it; None: there was none.

    >>> recovered({"shift": 100, "right": [1] * 100 + [0] * 100 + [1] * 100})
    200
    """
    shift, right = result["shift"], result["right"]
    level = RECOVERED * mean(right[:shift])
    ends = range(shift + WINDOW, len(right) + 1, WINDOW)
    return next((end - shift for end in ends if mean(right[end - WINDOW : end]) >= level), None)


def row(key: str, result: Result) -> str:
    shift, right = min(result["shift"], len(result["right"])), result["right"]
    after = right[shift : shift + 2 * WINDOW]
    became = Counter(d["state"] for d in result["decisions"] if d["version"])
    cells = [f"{mean(right[:shift]):.3f}", f"{mean(after):.3f}" if after else "", f"{mean(right[-2 * WINDOW :]):.3f}"]
    cells += [str(recovered(result) or "never") if after else "", str(len(right)), f"{result['seconds']} s"]
    cells += [", ".join(f"{count} {state}" for state, count in became.items())]
    return f"| {' | '.join([key, *cells])} |"


def kept() -> dict[str, Result]:
    results: dict[str, Result] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plays", nargs="*", metavar="PLAY", help=", ".join(PLAYS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sessions", type=int, help="other than the play's own number")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of agl learn")
    options = parser.parse_args()
    if unknown := set(options.plays) - set(PLAYS):
        parser.error(f"there is no play {', '.join(sorted(unknown))}: there are {', '.join(PLAYS)}")
    for name in options.plays:
        played = play(name, options.seed, options.sessions, options.set)
        RESULTS.write_text(json.dumps({**kept(), f"{name}/{options.seed}": played}, sort_keys=True) + "\n")
    print(_HEAD, *(row(key, result) for key, result in kept().items()), sep="\n")


if __name__ == "__main__":
    main()
