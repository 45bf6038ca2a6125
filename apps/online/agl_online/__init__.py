"""Real use of what agl trains: sessions, feedback, versions behind a gate and a canary, and serving a policy."""

HELP = {
    "serve": "Stand between deployed applications and their model.",
    "learn": "Serve a run's versions to applications, and learn from their sessions.",
    "sessions": "List and delete sessions of real use, and make keys for them.",
    "versions": "List, promote and roll back the versions that answer real use.",
    "policy": "Export and serve what runs have trained.",
}


def add_commands(cli: object) -> None:
    from agl_core.cli import COMMANDS, Command  # Here, because runs import this package too.

    COMMANDS.update({name: Command("agl_online.cli", name, "Real use", text) for name, text in HELP.items()})
