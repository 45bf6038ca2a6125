"""Attaching to agents without touching their code: at imports, in threads, and in every Python process of a command."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.machinery import PathFinder
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, cast

from wrapt import register_post_import_hook

from agl_core import kinds
from agl_core.capture.context import HERE, NOWHERE, AttemptContext, Here, holding, start_running
from agl_core.capture.reports import report_problem, spooled
from agl_core.capture.requests import HTTP_LIBRARIES, Stamper, rollout_path
from agl_core.capture.watching import Patches, watches
from agl_core.errors import PluginError
from agl_core.plugins import Plugins
from agl_core.protocols import Adapter
from agl_core.types import AttemptKey

SITE = Path(__file__).parent / "site"
_TELEMETRY = "OTEL_EXPORTER_OTLP_"


class Attachment:
    """The patches in this process by which agents are seen without a change to their code."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        """The frameworks whose adapter could not be attached, and why."""
        self._stamper, self._patches = Stamper(), Patches()
        self._waiting: dict[str, list[Callable[[ModuleType], None]]] = {}
        """Actions at the import of each module; they must not raise, or the user's own import would fail."""
        self._known: set[tuple[str, object]] = set()
        """Frameworks, each with a function that attaches to it; instances of one class have the same."""

    def install(self, adapters: Iterable[Adapter]) -> None:
        """Stamp requests, carry attempts into threads, and attach each adapter when its framework is imported."""
        # A thread belongs to the attempt that started it, a pool's thread to the one that submitted its work.
        self._patches.replace(Thread, "start", _carrying_start)
        self._patches.replace(ThreadPoolExecutor, "submit", _carrying_submit)
        for library in HTTP_LIBRARIES:
            self._when_imported(library, self._stamp)
        for adapter in adapters:
            known = (adapter.framework, getattr(adapter.attach, "__func__", adapter.attach))
            if known not in self._known:
                self._known.add(known)
                self._when_imported(adapter.framework, functools.partial(self._attach, adapter))
                names = itertools.accumulate(adapter.framework.split("."), "{}.{}".format)
                for parent, module in itertools.pairwise(names):
                    self._when_imported(parent, functools.partial(self._look_for, module, adapter))

    def detach(self) -> None:
        """Stop stamping, carrying, and what adapters `watch`. Other hooks of theirs stay in their frameworks."""
        self._known.clear()
        self.failed.clear()
        self._waiting.clear()
        self._stamper.resolvers.clear()
        self._patches.restore()
        watches().restore()

    def _when_imported(self, module: str, action: Callable[[ModuleType], None]) -> None:
        """Call `action` when `module` is imported; at once if it already is."""
        self._waiting.setdefault(module, []).append(action)
        register_post_import_hook(self._imported, module)

    def _imported(self, module: ModuleType) -> None:
        for action in self._waiting.pop(module.__name__, ()):
            action(module)

    def _stamp(self, library: ModuleType) -> None:
        try:
            HTTP_LIBRARIES[library.__name__](library, self._stamper, self._patches)
        except Exception as error:
            report_problem(f"Attaching to {library.__name__}", error)

    def _look_for(self, module: str, adapter: Adapter, parent: ModuleType) -> None:
        """Report an adapter that waits in vain: the framework is installed, and has no such module."""
        # A namespace belongs to several packages: the one with this module may not be installed.
        is_package = getattr(parent, "__file__", None) is not None
        path = getattr(parent, "__path__", [])
        if is_package and module not in sys.modules and PathFinder.find_spec(module, path) is None:
            framework = module.partition(".")[0]
            problem = (
                f"the {framework} that is installed has no module {module}, so its agents and tools are not seen. "
                f"Upgrade the package with this adapter, or install the version of {framework} that it is made for"
            )
            self._failed(adapter, ModuleNotFoundError(problem))

    def _attach(self, adapter: Adapter, _: ModuleType) -> None:
        try:
            resolver = adapter.attach()
        except Exception as error:
            self._failed(adapter, error)
        else:
            if resolver is not None:
                self._stamper.resolvers.append(resolver)

    def _failed(self, adapter: Adapter, error: Exception) -> None:
        self.failed[adapter.framework] = f"{type(error).__name__}: {error}"
        report_problem(f"Attaching to {adapter.framework}", error)


def attach(adapters: Iterable[Adapter] | None = None) -> Attachment:
    """See the agents of this process without a change to their code; calling it again adds new adapters.

    Requests to the Lightning Server name their attempt and agent, and each adapter (by default every installed one) is
    attached when its framework is imported. An adapter that fails is reported and does not break the agent.

    >>> attach([]).failed
    {}
    """
    attachment = _of_this_process()
    attachment.install(installed_adapters() if adapters is None else adapters)
    return attachment


def installed_adapters(plugins: Plugins | None = None) -> list[Adapter]:
    """The adapters that plugins bring, with their default settings; one that cannot be made is reported."""
    adapters = []
    for name, component in (plugins or Plugins.load()).components(kinds.ADAPTER).items():
        try:
            adapters.append(component.build(component.options()))
        except Exception as error:
            report_problem(f"Making the adapter '{name}' of {component.origin}", error)
    return adapters


@functools.cache
def _of_this_process() -> Attachment:
    # Patched classes belong to the whole process, and so does what patched them.
    return Attachment()


def _carrying_start(start: Callable[[Thread], None]) -> Callable[[Thread], None]:
    def carrying_start(thread: Thread) -> None:
        here = Here.now()
        if not here.is_nowhere:
            # The instance's attribute hides the method, so that subclasses that override `run` are reached too.
            thread.run = functools.partial(_run_in, here, thread.run)  # type: ignore[method-assign]
        start(thread)

    return carrying_start


def _carrying_submit(submit: Callable[..., Any]) -> Callable[..., Future[Any]]:
    def carrying_submit(
        pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        here = Here.now()
        if here.is_nowhere:
            return cast("Future[Any]", submit(pool, function, *args, **kwargs))
        # A pool's thread outlives this attempt: it must not be started as one of its threads.
        with holding(HERE, NOWHERE):
            return cast("Future[Any]", submit(pool, _run_in, here, functools.partial(function, *args, **kwargs)))

    return carrying_submit


def _run_in(here: Here, run: Callable[[], Any]) -> Any:
    with holding(HERE, here):
        return run()


def bootstrap_variables(
    attempt: AttemptKey,
    base_url: str,
    api_key: str,
    reports: Path,
    environment: Mapping[str, str],
    plugins: Sequence[Path] = (),
) -> dict[str, str]:
    """The variables to add to `environment`, so that each Python process of a command attaches itself to an attempt.

    Requests to the server at `base_url` are stamped and carry `api_key`; reports are written below `reports` (see
    `read_spool`). Adapters are the installed ones, those of the files `plugins`, and those of the command's own Python,
    whose frameworks the entry-point group `agl.frameworks` names. A process that imports no framework, no HTTP library
    and no agl is left alone. An OpenTelemetry exporter sends its spans to the attempt, unless `environment` says where.
    """
    telemetry = {
        f"{_TELEMETRY}TRACES_ENDPOINT": f"{base_url}{rollout_path(*attempt)}/v1/traces",
        f"{_TELEMETRY}TRACES_HEADERS": f"Authorization=Bearer%20{api_key}",
        f"{_TELEMETRY}TRACES_PROTOCOL": "http/protobuf",
    }
    return {
        "AGL_BASE_URL": base_url,
        "AGL_API_KEY": api_key,
        "AGL_ROLLOUT": attempt.rollout,
        "AGL_ATTEMPT": str(attempt.attempt),
        "AGL_REPORTS": str(reports),
        "AGL_TRIGGERS": ",".join(sorted({"agl_core", *_own_frameworks(*plugins)})),
        "AGL_LIBRARIES": ",".join(HTTP_LIBRARIES),
        "AGL_PLUGINS": os.pathsep.join(map(str, plugins)),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SITE), environment.get("PYTHONPATH")])),
        **({} if any(name.startswith(_TELEMETRY) for name in environment) else telemetry),
    }


@functools.cache
def _own_frameworks(*files: Path) -> frozenset[str]:
    # A worker asks for each attempt, and the packages stay the same.
    return frozenset(adapter.framework for adapter in _adapters(files))


def attach_to_attempt(environment: Mapping[str, str]) -> None:
    """Attach this process to the attempt that `bootstrap_variables` put into its environment."""
    recording = spooled(Path(environment["AGL_REPORTS"]))
    start_running(
        AttemptContext(
            environment["AGL_ROLLOUT"],
            int(environment["AGL_ATTEMPT"]),
            environment["AGL_BASE_URL"],
            environment["AGL_API_KEY"],
            recording,
        )
    )
    attach(_adapters([Path(file) for file in environment.get("AGL_PLUGINS", "").split(os.pathsep) if file]))


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
