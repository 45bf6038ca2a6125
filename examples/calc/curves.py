"""Draws the reward curves of runs of this example: `python curves.py RUN… --out curves.svg`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
from matplotlib import pyplot

matplotlib.use("svg")


def evaluations(run: Path, name: str, mode: str) -> tuple[list[int], list[float]]:
    """Steps and rewards of one held-out set and mode."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line[f"{name}/{mode}/reward/mean"]) for line in lines if line["kind"] == "eval"]
    return [step for step, _ in found], [reward for _, reward in found]


def draw(runs: list[Path], out: Path) -> None:
    """One panel per held-out set, one colour per run: dots are evaluations, the thin line is the training reward."""
    matplotlib.rcParams["svg.hashsalt"] = "calc"
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    titles = {"eval": "held-out number pairs", "eval_templates": "held-out sentence templates"}
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        for number, run in enumerate(runs):
            summary = json.loads((run / "summary.json").read_text())
            rewards = summary["train_rewards"]
            panel.plot(range(1, len(rewards) + 1), rewards, color=f"C{number}", linewidth=0.7, alpha=0.6)
            for mode, style in (("greedy", "o-"), ("sampled", "s--")):
                steps, found = evaluations(run, name, mode)
                label = f"seed {summary['seed']}, {mode}"
                panel.plot(steps, found, style, color=f"C{number}", label=label, linewidth=1.4, markersize=4)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("step (16 tasks × 8 rollouts each)")
        panel.set_ylim(-0.02, 1.02)
        panel.grid(alpha=0.3)
    panels[0].axhline(0.9, color="grey", linewidth=0.8)
    panels[0].set_ylabel("mean reward")
    panels[1].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--out", type=Path, default=Path("curves.svg"))
    arguments = parser.parse_args()
    draw(arguments.runs, arguments.out)


if __name__ == "__main__":
    main()
