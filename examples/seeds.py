"""Trains an example once per seed, and shows what all seeds reached.

    python examples/seeds.py examples/math --seeds 5

Runs come one after another, each a plain `agl train … --set seed=… --set name=…`, and its result is kept in the
example's `results.json` as soon as it ends: call it again to go on after an interruption, or for more seeds. A seed is
trained again if `train.toml` or the policy has changed since. At the end the table is printed as Markdown, and
`curves.svg` drawn; both need no run folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

from agl_core.analysis.curves.plots import Curves, draw

Result: TypeAlias = dict[str, Any]
"""What is kept of a run: its summary's figures, the cores it had, and the digest of what it trained."""

MODES = ("greedy", "sampled")
KEPT = ("rewards", "seconds", "peak_rss_bytes", "rollouts", "llm_calls", "evaluations", "train_rewards")


def digest(example: Path) -> str:
    """Identifies the configuration and the policy."""
    config = tomllib.loads((example / "train.toml").read_text())
    found = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in sorted((example / "policy").iterdir()):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def train(example: Path, seed: int) -> Result:
    """Train with this seed, and return what is kept of it. Exits if training fails or is interrupted."""
    name = f"{example.name}-seed-{seed}"
    command = [str(Path(sys.executable).with_name("agl")), "train", str(example / "train.toml")]
    ended = subprocess.run([*command, "--set", f"seed={seed}", "--set", f"name={name}"])
    if ended.returncode:
        sys.exit(f"{name} ended with status {ended.returncode}; call this again to go on")
    # If runs/NAME was taken, agl made runs/NAME-2 and so on.
    summaries = [*Path("runs").glob(f"{name}/summary.json"), *Path("runs").glob(f"{name}-*/summary.json")]
    summary = json.loads(max(summaries, key=lambda file: file.stat().st_mtime).read_text())
    return {key: summary[key] for key in KEPT} | {"digest": digest(example), "cores": len(os.sched_getaffinity(0))}


def read(file: Path) -> dict[int, Result]:
    """Results by seed."""
    return {int(seed): kept for seed, kept in json.loads(file.read_text()).items()} if file.is_file() else {}


def write(file: Path, results: dict[int, Result]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(results, sort_keys=True) + "\n")
    os.replace(part, file)


def table(results: dict[int, Result]) -> Iterator[str]:
    """Start → end of each seed, held-out set and mode, as Markdown."""
    sets = list(next(iter(results.values()))["rewards"])
    columns = [(name, mode) for name in sets for mode in MODES]
    head = ["seed", *(f"`{name}`, {mode}" for name, mode in columns), "seconds", "rollouts"]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"

    def row(label: str, kept: Sequence[Result]) -> str:
        ends = [
            [mean(each["rewards"][name][when][mode] for each in kept) for when in ("before", "after")]
            for name, mode in columns
        ]
        cells = [f"{start:.3f} → {end:.3f}" for start, end in ends]
        cells += [f"{mean(each['seconds'] for each in kept):.0f}"]
        cells += [f"{mean(sum(each['rollouts'].values()) for each in kept):.0f}"]
        return f"| {' | '.join([label, *cells])} |"

    for seed, result in sorted(results.items()):
        yield row(str(seed), [result])
    if len(results) > 1:
        yield row("mean", list(results.values()))


def curves(result: Result) -> Curves:
    """The rewards of a seed, in training and of its evaluations."""
    kinds = dict.fromkeys((each["set"], each["mode"]) for each in result["evaluations"])
    held_out = {
        kind: [(e["step"], e["reward"]) for e in result["evaluations"] if (e["set"], e["mode"]) == kind]
        for kind in kinds
    }
    return Curves(list(enumerate(result["train_rewards"], 1)), held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", type=Path, help="the example's folder")
    parser.add_argument("--seeds", type=int, default=5, help="how many: 0, 1, …")
    options = parser.parse_args()
    file, current = options.example / "results.json", digest(options.example)
    results = read(file)
    for seed in range(options.seeds):
        if results.get(seed, {}).get("digest") == current:
            continue
        results[seed] = train(options.example, seed)
        write(file, results)
    kept = {seed: result for seed, result in results.items() if result["digest"] == current}
    print("\n".join(table(kept)))
    draw({options.example.name: [curves(each) for each in kept.values()]}, options.example / "curves.svg")


if __name__ == "__main__":
    main()
