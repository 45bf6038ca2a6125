"""Attaches agl in the Python processes of a command that agl runs: this folder is put on its PYTHONPATH.

A process that imports nothing that agl could attach to is left as it is; its calls to model APIs elsewhere are
reported. Python imports one sitecustomize only, so the one that it would have imported without agl is imported from
here. This file may be run by any Python, with or without agl installed, and must never fail.
"""

import functools
import importlib.util
import json
import os
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder


def _import_next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [each for each in sys.path if os.path.abspath(each) != here])
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class _Attaching:
    """Attaches agl right after a framework was imported, or else when a request is about to go to the server.

    Until then nothing is imported that the program did not import: programs, and what they import, may look at what is
    there. Nor is agl attached in the middle of an import of what agl itself needs.
    """

    def __init__(self, triggers, environment) -> None:  # type: ignore[no-untyped-def]
        self._triggers, self._reports = triggers, environment["AGL_REPORTS"]
        self._server = environment.get("AGL_BASE_URL", "").partition("//")[2].partition("/")[0]
        self._model_calls = environment.get("AGL_MODEL_CALLS", "$^")
        self._asked, self._attached, self._has_failed = False, False, False
        self._importing = 0
        """Frameworks whose import has begun and not ended."""
        self._due = False

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname not in _SENDING and fullname.split(".")[0] in getattr(sys, "stdlib_module_names", ()):
            return None  # A process that needs nothing else is not slowed down.
        if not self._asked:
            self._asked = True
            self._triggers = self._triggers | _frameworks()
        if self._due:
            self._attach_if_possible()
            if self._attached and fullname in sys.modules:  # agl itself has imported it
                # Taken out, for Python would load it again by the spec of a module that it finds there.
                return ModuleSpec(fullname, _Imported(sys.modules.pop(fullname)))  # type: ignore[arg-type]
        if self._attached or (fullname not in self._triggers and fullname not in _SENDING):
            return None
        for finder in list(sys.meta_path):
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                self._hook(spec)
                return spec
        return None

    def _hook(self, spec) -> None:  # type: ignore[no-untyped-def]
        """Act when the module is there. The loader keeps its type."""
        loader = spec.loader
        if loader is None or isinstance(loader, type) or not hasattr(loader, "exec_module"):
            return
        execute, is_framework = loader.exec_module, spec.name in self._triggers

        def exec_module(module) -> None:  # type: ignore[no-untyped-def]
            self._importing += is_framework
            try:
                execute(module)
            finally:
                self._importing -= is_framework
            self._wait_for_requests(module)
            if is_framework:
                self._due = True
                self._attach_if_possible(module.__name__)

        try:
            loader.exec_module = exec_module
        except Exception:
            return

    def _wait_for_requests(self, module) -> None:  # type: ignore[no-untyped-def]
        for kind, name in () if self._attached else _SENDING.get(module.__name__, ()):
            owner = getattr(module, kind, None)
            if hasattr(owner, name):
                setattr(owner, name, self._waiting(owner, name))  # type: ignore[no-untyped-call]

    def _waiting(self, owner, name):  # type: ignore[no-untyped-def]
        send = getattr(owner, name)

        @functools.wraps(send)
        def waiting(client, *args, **kwargs):  # type: ignore[no-untyped-def]
            address = "" if self._attached and not self._has_failed else _address(client, args, kwargs)
            if self._server in address and not self._attached:
                is_mine = getattr(owner, name) is waiting
                if is_mine:
                    setattr(owner, name, send)
                self._attach()
                if is_mine:
                    return getattr(owner, name)(client, *args, **kwargs)
            elif self._server not in address and re.search(self._model_calls, address):
                self._report({"bypassed": address})
            return send(client, *args, **kwargs)

        return waiting

    def _attach_if_possible(self, complete="") -> None:  # type: ignore[no-untyped-def]
        if not self._attached and not self._importing and not _is_importing_what_agl_needs(complete):
            self._attach()

    def _attach(self) -> None:
        self._attached, self._due = True, False
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            from agl_core.capture.attaching import attach_to_attempt

            attach_to_attempt(os.environ)
        except Exception as error:
            self._has_failed = True
            problem = (
                f"agl could not attach to {sys.executable}: {type(error).__name__}: {error}. Its LLM calls are "
                "recorded, but not who made them and what the tools did: install agl-core and the adapters there."
            )
            self._report({"problem": problem})

    def _report(self, report) -> None:  # type: ignore[no-untyped-def]
        try:
            with open(os.path.join(self._reports, f"{os.getpid()}.jsonl"), "a", encoding="utf-8") as spool:
                spool.write(json.dumps(report) + "\n")
        except OSError:
            sys.stderr.write(f"agl: {report}\n")


_SENDING = {
    "httpx": (("Client", "send"), ("AsyncClient", "send")),
    "httpx2": (("Client", "send"), ("AsyncClient", "send")),
    "urllib3.connectionpool": (("HTTPConnectionPool", "urlopen"),),
    "aiohttp.client": (("ClientSession", "_request"),),
    "http.client": (("HTTPConnection", "request"),),
}
"""What sends the requests of each HTTP library that agl stamps."""
_NEEDED = frozenset(
    {"agl_core", "annotated_types", "numpy", "orjson", "pluggy", "pydantic", "pydantic_core"}
    | {"typing_extensions", "typing_inspection"}
)
"""What agl imports when it attaches, beside Python's own modules."""


def _is_importing_what_agl_needs(complete: str) -> bool:
    """`complete` is a module that is there, though its import has not returned yet."""
    return any(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in _NEEDED and name != complete
    )


def _address(client, args, kwargs) -> str:  # type: ignore[no-untyped-def]
    """Where a request goes, without the query, in any of the forms in which libraries have it."""
    url = getattr(args[0], "url", None) if args else None
    url = str(kwargs.get("url", args[1] if len(args) > 1 else "") if url is None else url).partition("?")[0]
    if "://" not in url:
        port = getattr(client, "port", None)
        host = f"{'https' if port == 443 else 'http'}://{getattr(client, 'host', '')}:{port}"
        base = getattr(client, "_base_url", None) or host
        url = f"{base}{url}"
    return url.replace("://localhost:", "://127.0.0.1:").replace(":443/", "/", 1).rstrip("/")


def _frameworks() -> "frozenset[str]":
    """The frameworks that adapters of this Python name, which agl's own Python may not have."""
    try:
        from importlib.metadata import entry_points

        return frozenset(entry.name for entry in entry_points(group="agl.frameworks"))
    except Exception:
        return frozenset()


class _Imported:
    """Loads a module that is there already, and leaves it as it is."""

    def __init__(self, module) -> None:  # type: ignore[no-untyped-def]
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return self._module

    def exec_module(self, module) -> None:  # type: ignore[no-untyped-def]
        module.__spec__ = self._spec


try:
    _import_next()
finally:
    if "AGL_REPORTS" in os.environ and "AGL_TRIGGERS" in os.environ:
        sys.meta_path.insert(0, _Attaching(frozenset(os.environ["AGL_TRIGGERS"].split(",")), os.environ))
