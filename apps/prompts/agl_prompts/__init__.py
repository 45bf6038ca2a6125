"""Prompts instead of weights: an agent's prompts are improved by reflection on its rollouts."""

HELP = "Improve the prompts of the agent that a configuration names."


def add_commands(cli: object) -> None:
    from agl_core.cli import COMMANDS, START, Command  # Here, because runs import this package too.

    COMMANDS["optimize"] = Command("agl_prompts.cli", "optimize", START, HELP)
