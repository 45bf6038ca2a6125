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

import matplotlib
from matplotlib import pyplot

matplotlib.use("svg")

Result: TypeAlias = dict[str, Any]
"""What is kept of a run: its summary's figures, the cores it had, and the digest of what it trained."""
Curve: TypeAlias = list[tuple[int, float]]
"""Steps and rewards."""

MODES = {"greedy": "o-", "sampled": "s--"}
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


def curve(result: Result, name: str, mode: str) -> Curve:
    """The evaluations of one held-out set and mode."""
    return [(e["step"], e["reward"]) for e in result["evaluations"] if (e["set"], e["mode"]) == (name, mode)]


def draw(results: dict[int, Result], out: Path) -> None:
    """One panel per held-out set: lines are means over seeds, bands reach from the worst to the best seed."""
    matplotlib.rcParams["svg.hashsalt"] = out.parent.name
    sets = list(next(iter(results.values()))["rewards"])
    figure, row = pyplot.subplots(1, len(sets), figsize=(1 + 3.7 * len(sets), 3.4), sharey=True, squeeze=False)
    for panel, name in zip(row[0], sets, strict=True):
        training: list[Curve] = [list(enumerate(each["train_rewards"], 1)) for each in results.values()]
        _band(panel, training, "-", color="grey", label="training", linewidth=0.7)
        for color, (mode, style) in zip(("C0", "C1"), MODES.items(), strict=True):
            curves = [curve(each, name, mode) for each in results.values()]
            _band(panel, curves, style, color=color, label=mode, linewidth=1.4, markersize=4)
        panel.axhline(0.9, color="grey", linewidth=0.8, linestyle=":")
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("step")
        panel.set_ylim(-0.02, 1.02)
        panel.grid(alpha=0.3)
    row[0][0].set_ylabel("mean reward")
    row[0][-1].legend(fontsize=8, loc="lower right", title=f"{len(results)} seeds", title_fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
    out.write_text("\n".join(line.rstrip() for line in out.read_text().splitlines()) + "\n")


def _band(panel: Any, curves: list[Curve], style: str, *, color: str, **drawn: Any) -> None:
    by_step: dict[int, list[float]] = {}
    for step, reward in (point for each in curves for point in each):
        by_step.setdefault(step, []).append(reward)
    steps, rewards = list(by_step), list(by_step.values())
    panel.plot(steps, [mean(found) for found in rewards], style, color=color, **drawn)
    panel.fill_between(
        steps, [min(found) for found in rewards], [max(found) for found in rewards], color=color, alpha=0.2
    )


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
    draw(kept, options.example / "curves.svg")


if __name__ == "__main__":
    main()
