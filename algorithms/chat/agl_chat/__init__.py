"""agl's chat layer, and its command."""


def add_commands(cli: object) -> None:
    from agl_core.cli import COMMANDS, START, Command  # Here, because engines import this package too.

    COMMANDS["proxy"] = Command("agl_chat.proxy", "proxy", START, "Keep token ids exact before vLLM or SGLang.")
