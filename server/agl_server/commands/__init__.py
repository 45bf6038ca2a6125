"""The commands of runs, by their names; each is imported when it is called."""

from __future__ import annotations

import typer

from agl_core.cli import CHECK, COMMANDS, DATA, LOOK, START, Command

_OWN = {
    "init": Command("init", "init", START, "Write train.toml, reward.py and tasks.jsonl for your agent."),
    "train": Command("train", "train", START, "Train the agent that a configuration names."),
    "eval": Command("train", "evaluate", START, "Evaluate on every held-out set, and print the rewards."),
    "run": Command("run", "run", START, "Run a command, and record what its agent does as one rollout.", True),
    "runs": Command("runs", "runs", LOOK, "List runs, make them smaller, and remove them."),
    "rollouts": Command("runs", "rollouts", LOOK, "List the rollouts of a run, the newest last."),
    "show": Command("runs", "show", LOOK, "Show a rollout turn by turn, and what training made of it."),
    "reward": Command("data", "reward", DATA, "Try other rewards and credit on what was recorded."),
    "export": Command("data", "export", DATA, "Write what was recorded of a run for other tools."),
    "import": Command("data", "import_", DATA, "Make a run of recorded conversations."),
    "doctor": Command("doctor", "doctor", CHECK, "Check this environment and a configuration, a server or a run."),
}


def add(cli: typer.Typer) -> None:
    """Add them to `COMMANDS`, before the core's own."""
    core = {name: command for name, command in COMMANDS.items() if name not in _OWN}
    COMMANDS.clear()
    COMMANDS.update({name: command._replace(module=f"{__name__}.{command.module}") for name, command in _OWN.items()})
    COMMANDS.update(core)
