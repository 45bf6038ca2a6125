"""Attaching to every Python process of a command, with no change to its code: by the environment that it inherits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from agl_core.capture.attaching import attach, installed_adapters
from agl_core.capture.context import ActiveAttempt, start_running
from agl_core.capture.recording import Recording
from agl_core.capture.reports import report_problem
from agl_core.capture.spool import SpooledRecording, read_spool
from agl_core.capture.stamping import HTTP_LIBRARIES
from agl_core.protocols import Adapter
from agl_core.types import AttemptKey

SITE = Path(__file__).parent / "site"
"""The folder with our sitecustomize."""
_FRAMEWORKS = ("agents", "autogen_agentchat", "autogen_core", "langchain_core", "opentelemetry.sdk.trace")
"""Whose adapters the command's Python may have, even if this one has not."""


@contextmanager
def bootstrapped(
    attempt: AttemptKey, base_url: str, api_key: str, recording: Recording, environment: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """What to set beside `environment` for a command that is run inside, so that its Python processes attach.

    At the end, what they reported is in `recording`. See `bootstrap_variables`.
    """
    with TemporaryDirectory(prefix="agl-") as folder:
        reports = Path(folder)
        yield bootstrap_variables(attempt, base_url, api_key, reports, environment)
        read_spool(reports, recording)


def bootstrap_variables(
    attempt: AttemptKey, base_url: str, api_key: str, reports: Path, environment: Mapping[str, str]
) -> dict[str, str]:
    """What to set beside `environment`, so that each Python process of a command attaches itself to an attempt.

    Requests to the server at `base_url` are stamped and carry `api_key`; what adapters and the agent report is
    written below `reports` (see `agl_core.capture.spool.read_spool`). A process that imports no HTTP library, no
    framework and no agl is left alone. A proxy of the environment is not used for the server.
    """
    host = urlsplit(base_url).hostname or ""
    variables = {
        "AGL_BASE_URL": base_url,
        "AGL_API_KEY": api_key,
        "AGL_ROLLOUT": attempt.rollout,
        "AGL_ATTEMPT": str(attempt.attempt),
        "AGL_REPORTS": str(reports),
        "AGL_TRIGGERS": ",".join(sorted({"agl_core", *HTTP_LIBRARIES, *_FRAMEWORKS, *_own_frameworks()})),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SITE), environment.get("PYTHONPATH")])),
    }
    for name in ("NO_PROXY", "no_proxy"):
        variables[name] = ",".join(filter(None, [environment.get(name), host]))
    return variables


def _own_frameworks() -> set[str]:
    return {adapter.framework for adapter in _adapters()}


def attach_to_attempt(environment: Mapping[str, str]) -> None:
    """Attach this process to the attempt that `bootstrap_variables` put into its environment."""
    recording = SpooledRecording(Path(environment["AGL_REPORTS"]))
    start_running(
        ActiveAttempt(
            environment["AGL_ROLLOUT"],
            int(environment["AGL_ATTEMPT"]),
            environment["AGL_BASE_URL"],
            environment["AGL_API_KEY"],
            recording,
        )
    )
    attach(_adapters())


def _adapters() -> list[Adapter]:
    try:
        return installed_adapters()
    except Exception as error:
        report_problem("Looking for adapters", error)
        return []
