"""What asynchronous training gains where some rollouts are slow: two runs of the calc example for each seed.

    python tests/benchmarks/async_training.py

trains the calc example from the same weights on the same tasks twice, once with `async.max_staleness = 0` and once with
4, and so for each of `--seeds` seeds.
Its tool sleeps before it answers: log-normal, the slowest hundredth at least ten times as long as the median, and as
long for the same call of the same rollout in both. All rollouts of a synchronous step can run at once, so that it waits
for nothing but its slowest; the other run has no more workers. The engine has one thread, so that CPU seconds by
wall-clock second say how busy it was. Times are of training alone, without start and evaluations. It ends with status 1
unless the second runs made at least twice the rollouts per hour (`--at-least`) and their final reward is no worse (by
more than `--tolerance`), both on average over the seeds. `--write` puts the table into docs/asynchronous.md.

Needs a quiet machine; takes about thirteen minutes a seed. With `--folder` it can be interrupted: call it again, and it
goes on with what is missing. `--seeds 1 --steps 2 --groups 2 --at-least 0` only shows that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CALC = ROOT / "examples" / "calc" / "train.toml"
PAGE = ROOT / "docs" / "asynchronous.md"
BEGIN, END = "<!-- written by tests/benchmarks/async_training.py -->", "<!-- to here -->"
GROUP_SIZE = 8
LOOK_AGAIN = 0.1
ENGINE = "agl_torch.process"


@dataclass(frozen=True)
class Measured:
    """One run."""

    rollouts: float
    hours: float
    engine_seconds: float
    staleness: float
    stale: float
    greedy: float
    sampled: float

    @property
    def per_hour(self) -> float:
        return self.rollouts / self.hours

    @property
    def utilisation(self) -> float:
        return self.engine_seconds / (3600 * self.hours)


def row(name: str, runs: Sequence[Measured]) -> str:
    """Means over the seeds; of rewards also the range."""

    def average(value: Callable[[Measured], float]) -> float:
        return mean(map(value, runs))

    def reward(mode: str) -> str:
        values = [getattr(each, mode) for each in runs]
        return f"{mean(values):.3f}" + (f" ({min(values):.3f}–{max(values):.3f})" if len(values) > 1 else "")

    return (
        f"| {name} | {len(runs)} | {average(lambda run: run.rollouts):.0f} | {average(lambda run: 60 * run.hours):.1f} "
        f"| {average(lambda run: run.per_hour):,.0f} | {average(lambda run: run.utilisation):.0%} | {reward('greedy')} "
        f"| {reward('sampled')} | {average(lambda run: run.staleness):.2f} | {average(lambda run: run.stale):.0f} |"
    )


HEAD = """\
| run | seeds | rollouts | minutes | rollouts per hour | engine busy | greedy | sampled | mean staleness | stale |
|---|---|---|---|---|---|---|---|---|---|"""


def kept(kind: str, staleness: int, seed: int, folder: Path, options: argparse.Namespace) -> Measured:
    """What was measured with this seed, now or before an interruption."""
    name = f"{kind}-{seed}"
    file = folder / f"{name}.json"
    if not file.exists():
        found = run(name, staleness, seed, folder, options)
        file.write_text(json.dumps(asdict(found)))
    return Measured(**json.loads(file.read_text()))


def run(name: str, staleness: int, seed: int, folder: Path, options: argparse.Namespace) -> Measured:
    """Train once."""
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)  # It was interrupted.
    settings = {
        "name": name,
        "seed": seed,
        "agent.entry": "slow_calc_agent:solve",
        "train.steps": options.steps,
        "train.groups_per_step": options.groups,
        "train.group_size": GROUP_SIZE,
        "train.checkpoint_every": options.steps,
        "async.max_staleness": staleness,
        "algorithm.grpo.importance_cap": 2.0,
        "workers.concurrency": options.workers or options.groups * GROUP_SIZE,
        "engine.torch.threads": 1,
        "eval.every": options.steps,
        "eval.tasks": options.tasks,
    }
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        "SLOW_TOOL_MEDIAN": str(options.median),
        "SLOW_TOOL_TAIL": str(options.tail),
    }
    arguments = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    with (folder / f"{name}.log").open("w") as log:
        command = [Path(sys.executable).with_name("agl"), "train", CALC, *arguments]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            busy = engine_seconds(process, folder / "runs" / name / "metrics.jsonl", options.steps)
            status = process.wait()
        finally:
            process.terminate()
            process.wait()
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines() if not status else []
    if sum(json.loads(line)["kind"] == "train" for line in lines) != options.steps:
        sys.exit(f"The run failed or was interrupted:\n{(folder / f'{name}.log').read_text()}")
    return measured(folder / "runs" / name, busy)


def engine_seconds(process: subprocess.Popen[bytes], metrics: Path, steps: int) -> float:
    """The engine's CPU seconds from the end of the first evaluation to the end of the last step."""
    started = None
    while process.poll() is None:
        whole = metrics.read_text().rpartition("\n")[0] if metrics.exists() else ""  # The last may be half there.
        lines = [json.loads(line) for line in whole.splitlines()]
        if lines and started is None:
            started = engine_cpu(process.pid)
        if any(line["kind"] == "train" and line["step"] == steps for line in lines):
            return engine_cpu(process.pid) - (started or 0.0)
        time.sleep(LOOK_AGAIN)
    return 0.0


def engine_cpu(pid: int) -> float:
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if ENGINE in child.cmdline():
                times = child.cpu_times()
                return float(times.user + times.system)
        except psutil.Error:  # Some other child has just ended.
            continue
    return 0.0


def measured(folder: Path, busy: float) -> Measured:
    lines: list[Mapping[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    reward = json.loads((folder / "summary.json").read_text())["reward"]["after"]
    return Measured(
        rollouts=sum(line["rollouts"] for line in steps),
        hours=sum(line["seconds/step"] for line in steps) / 3600,
        engine_seconds=busy,
        staleness=sum(line["staleness/mean"] for line in steps) / len(steps),
        stale=sum(line.get("episodes_dropped/stale", 0) for line in steps),
        greedy=reward["greedy"],
        sampled=reward["sampled"],
    )


def setup(options: argparse.Namespace) -> str:
    """On what it was measured."""
    processor = platform.processor()
    if (described := Path("/proc/cpuinfo")).exists():
        names = [line.split(":")[1].strip() for line in described.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return (
        f"{options.steps} steps of {options.groups} · {GROUP_SIZE} rollouts, a tool call takes {options.median:g} s at "
        f"the median; {time.strftime('%B %Y')}, {os.cpu_count()} cores of an {processor}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=16, help=f"groups of a step, of {GROUP_SIZE} rollouts each")
    parser.add_argument("--staleness", type=int, default=4, help="of the asynchronous run")
    parser.add_argument("--median", type=float, default=1.0, help="of a tool call, in seconds")
    parser.add_argument("--tail", type=float, default=10.0, help="99th percentile of a tool call over its median")
    parser.add_argument("--workers", type=int, help="rollouts run at the same time; by default, those of one step")
    parser.add_argument("--tasks", type=int, default=200, help="of an evaluation")
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, …")
    parser.add_argument("--at-least", type=float, default=2.0, help="times the rollouts per hour")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of the final rewards")
    parser.add_argument("--folder", type=Path, help="where the runs go; by default, nowhere that stays")
    parser.add_argument("--write", action="store_true", help="put the table into docs/asynchronous.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        pairs = [
            (
                kept("synchronous", 0, seed, folder, options),
                kept("asynchronous", options.staleness, seed, folder, options),
            )
            for seed in range(options.seeds)
        ]
    if any(waiting.rollouts != going_on.rollouts for waiting, going_on in pairs):
        sys.exit("The runs are not comparable: they have different numbers of rollouts.")
    synchronous, asynchronous = zip(*pairs, strict=True)
    times = mean(each.per_hour for each in asynchronous) / mean(each.per_hour for each in synchronous)
    table = "\n".join([HEAD, row("synchronous", synchronous), row("asynchronous", asynchronous)])
    table += f"\n\n{times:.1f} times the rollouts per hour. {setup(options)}"
    print(table)
    if options.write:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}")
    if times < options.at_least:
        sys.exit(f"It was to be {options.at_least:g} times as many.")
    gained = [mean(getattr(other, mode) - getattr(one, mode) for one, other in pairs) for mode in ("greedy", "sampled")]
    if min(gained) < -options.tolerance:
        sys.exit("The final reward is worse.")


if __name__ == "__main__":
    main()
