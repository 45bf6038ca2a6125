"""The engine process: `python -m agl_torch.process`, started by `agl_torch.engine.TorchEngine`.

It reads its settings as one line of JSON from standard input, answers with one line of JSON on standard output,
writes its log to standard error, and ends when standard input ends: it cannot outlive whoever started it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
from typing import TextIO

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from transformers.utils import logging as transformers_logging

from agl_core.errors import AglError
from agl_torch.control import control_routes
from agl_torch.policies import Policies
from agl_torch.serve import EngineLoop, ServedModel, create_app
from agl_torch.wire import Ready, Settings

_log = logging.getLogger(__name__)


def main() -> int:
    """Load, announce, serve. Returns the exit code if it cannot."""
    announcements = _keep_standard_output()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings = Settings.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_standard_input, name="agl-parent", daemon=True).start()
    try:
        policies = Policies.load(settings)
    except Exception as error:
        _log.exception("The engine cannot start.")
        reason = str(error) if isinstance(error, AglError) else f"{type(error).__name__}: {error}"
        _announce(announcements, Ready(error=reason))
        return 1
    asyncio.run(_serve(settings, policies, announcements))
    return 0


async def _serve(settings: Settings, policies: Policies, announcements: TextIO) -> None:
    loop = EngineLoop({name: policy.sampler for name, policy in policies.policies.items()})
    served = {name: ServedModel(name, policy.loaded) for name, policy in policies.policies.items()}
    openai = create_app(served, loop, api_key=settings.api_key)
    app = Starlette(
        routes=[*control_routes(policies, loop, key=settings.control_key), Mount("/", app=openai)],
    )
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
    host = settings.options.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=2048)
    loop.start()
    port = listener.getsockname()[1]
    _announce(announcements, Ready(port=port, context_length=policies.context_length))
    _log.info("Serving %s on port %d.", ", ".join(served), port)
    await server.serve(sockets=[listener])
    await loop.stop()


def _keep_standard_output() -> TextIO:
    """Standard output for our line alone; whatever a library prints goes to the log."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


def _announce(announcements: TextIO, ready: Ready) -> None:
    with announcements:
        announcements.write(ready.model_dump_json() + "\n")


def _end_with_standard_input() -> None:
    while sys.stdin.read(4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
