"""Attaching to agents without touching their code."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType

from agl_core import kinds
from agl_core.capture.attach.imports import WhenImported
from agl_core.capture.attach.libraries import HTTP_LIBRARIES, stamp_library
from agl_core.capture.attach.methods import Patches
from agl_core.capture.attach.requests import Stamping
from agl_core.capture.attach.threads import carry_into_threads
from agl_core.capture.reports import report_problem
from agl_core.plugins import Plugins
from agl_core.protocols import Adapter


class Attachment:
    """What is patched in this process, so that agents are seen without a change to their code."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        """The frameworks whose adapter could not be attached, and why."""
        self._stamping, self._patches, self._imports = Stamping(), Patches(), WhenImported()
        self._known: set[tuple[str, object]] = set()
        """Frameworks, each with the function that attaches to it: instances of one class have the same."""

    def install(self, adapters: Iterable[Adapter]) -> None:
        """Stamp requests, carry attempts into threads, and attach each adapter when its framework is imported."""
        carry_into_threads(self._patches)
        for library in HTTP_LIBRARIES:
            self._imports.do(library, self._stamp)
        for adapter in adapters:
            known = (adapter.framework, getattr(adapter.attach, "__func__", adapter.attach))
            if known not in self._known:
                self._known.add(known)
                self._imports.do(adapter.framework, functools.partial(self._attach, adapter))

    def detach(self) -> None:
        """Stop stamping and carrying. The hooks of adapters stay in their frameworks, and have nothing to report to."""
        self._known.clear()
        self.failed.clear()
        self._imports.stop()
        self._stamping.resolvers.clear()
        self._patches.restore()

    def _stamp(self, library: ModuleType) -> None:
        try:
            stamp_library(library, self._stamping, self._patches)
        except Exception as error:
            report_problem(f"Attaching to {library.__name__}", error)

    def _attach(self, adapter: Adapter, _: ModuleType) -> None:
        try:
            resolver = adapter.attach()
        except Exception as error:
            self.failed[adapter.framework] = f"{type(error).__name__}: {error}"
            report_problem(f"Attaching to {adapter.framework}", error)
        else:
            if resolver is not None:
                self._stamping.resolvers.append(resolver)


def attach(adapters: Iterable[Adapter] | None = None) -> Attachment:
    """See the agents of this process without a change to their code; calling it again adds what is new.

    Requests that go to the Lightning Server say which attempt they belong to and who made them, and each adapter
    (by default all that are installed) is attached when its framework is imported. An adapter that fails is
    reported and does not break the agent.

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
