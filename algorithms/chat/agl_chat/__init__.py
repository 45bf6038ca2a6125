"""agl's chat layer, and its command."""


def add_commands(cli: object) -> None:
    """Add `agl chat`, which is imported when it is called."""
    from agl_core.cli import COMMANDS, START, Command  # Here, because engines import this package too.

    COMMANDS["chat"] = Command("agl_chat.front", "chat", START, "Keep token ids exact before a vLLM or SGLang server.")
