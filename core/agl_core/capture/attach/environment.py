"""Attaching to every Python process of a command, through its environment, with no change to its code."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from agl_core.capture.attach.attach import attach, installed_adapters
from agl_core.capture.attach.requests import MODEL_CALL
from agl_core.capture.context import ActiveAttempt, start_running
from agl_core.capture.recording import spooled
from agl_core.capture.reports import report_problem
from agl_core.errors import PluginError
from agl_core.plugins import Plugins
from agl_core.protocols import Adapter
from agl_core.types import AttemptKey
from agl_core.wire.headers import rollout_path

SITE = Path(__file__).parent / "site"
"""The folder with our sitecustomize."""
_TELEMETRY = "OTEL_EXPORTER_OTLP_"


def bootstrap_variables(
    attempt: AttemptKey,
    base_url: str,
    api_key: str,
    reports: Path,
    environment: Mapping[str, str],
    plugins: Sequence[Path] = (),
) -> dict[str, str]:
    """The variables to add to `environment`, so that each Python process of a command attaches itself to an attempt.

    Requests to the server at `base_url` are stamped and carry `api_key`. What adapters and the agent report is written
    below `reports` (see `read_spool`). `plugins` are files whose adapters are attached beside the installed ones.
    Frameworks are those of the adapters that are installed here, and those that adapters of the command's own Python
    name in the entry-point group `agl.frameworks`. A process that imports no framework and no agl, and asks the server
    for nothing, is left alone; that it calls a model API elsewhere is reported. An OpenTelemetry exporter sends its
    spans to the attempt, unless `environment` says where.
    """
    return {
        "AGL_BASE_URL": base_url,
        "AGL_API_KEY": api_key,
        "AGL_ROLLOUT": attempt.rollout,
        "AGL_ATTEMPT": str(attempt.attempt),
        "AGL_REPORTS": str(reports),
        "AGL_TRIGGERS": ",".join(sorted({"agl_core", *_own_frameworks(*plugins)})),
        "AGL_MODEL_CALLS": MODEL_CALL.pattern,
        "AGL_PLUGINS": os.pathsep.join(map(str, plugins)),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SITE), environment.get("PYTHONPATH")])),
        **_telemetry(attempt, base_url, api_key, environment),
    }


@functools.cache
def _own_frameworks(*files: Path) -> frozenset[str]:
    # What is installed does not change, and a worker asks for each attempt.
    return frozenset(adapter.framework for adapter in _adapters(files))


def _telemetry(attempt: AttemptKey, base_url: str, api_key: str, environment: Mapping[str, str]) -> dict[str, str]:
    if any(name.startswith(_TELEMETRY) for name in environment):
        return {}
    return {
        f"{_TELEMETRY}TRACES_ENDPOINT": f"{base_url}{rollout_path(*attempt)}/v1/traces",
        f"{_TELEMETRY}TRACES_HEADERS": f"Authorization=Bearer%20{api_key}",
        f"{_TELEMETRY}TRACES_PROTOCOL": "http/protobuf",
    }


def attach_to_attempt(environment: Mapping[str, str]) -> None:
    """Attach this process to the attempt that `bootstrap_variables` put into its environment."""
    recording = spooled(Path(environment["AGL_REPORTS"]))
    start_running(
        ActiveAttempt(
            environment["AGL_ROLLOUT"],
            int(environment["AGL_ATTEMPT"]),
            environment["AGL_BASE_URL"],
            environment["AGL_API_KEY"],
            recording,
        )
    )
    attach(_adapters([Path(each) for each in environment.get("AGL_PLUGINS", "").split(os.pathsep) if each]))


def _adapters(files: Sequence[Path]) -> list[Adapter]:
    try:
        plugins = Plugins.load(files)
        adapters = installed_adapters(plugins)
    except Exception as error:
        report_problem("Looking for adapters", error)
        return []
    for broken in plugins.broken:
        report_problem("Looking for adapters", PluginError(str(broken)))
    return adapters
