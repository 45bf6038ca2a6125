"""Every error that agl raises on purpose.

Each subclass of `AglError` is named after the boundary that was crossed, and derives from the standard error that a
caller would catch. A message names the thing, the place and the remedy.
"""

from __future__ import annotations

import difflib
import itertools
import sysconfig
import traceback
from collections.abc import Iterable

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_FRAMES = 2


class AglError(Exception):
    """The root of all errors that agl raises on purpose."""


class ConfigError(AglError, ValueError):
    """The run's configuration cannot be used as it is."""


class PluginError(AglError, LookupError):
    """A plugin is missing, broken, or registered twice."""


class CapabilityError(ConfigError):
    """Two parts of the configuration do not go together."""


class StoreError(AglError, OSError):
    """The store cannot be opened, read or written."""


class StoreRefusedError(StoreError):
    """A record that cannot be stored as it is, or a question with no one answer: the store itself is well."""


class EngineError(AglError, RuntimeError):
    """The engine did not start, died, or refused an update."""


class ServerError(AglError, ConnectionError):
    """The Lightning Server cannot be reached or refused a request."""


class AgentError(AglError, RuntimeError):
    """The user's agent cannot be loaded or called."""


class EpisodesError(AglError, ValueError):
    """A file of episodes cannot be read."""


class CheckpointError(AglError, OSError):
    """A checkpoint is missing, incomplete or from another configuration."""


class TrainingError(AglError, RuntimeError):
    """Training has nothing to learn from, step after step."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message that helps with a misspelt name.

    >>> nearest("grop", ["grpo", "ppo"])
    "Did you mean 'grpo'? Known: grpo, ppo."
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    question = f"Did you mean '{close[0]}'? " if close else ""
    return f"{question}Known: {', '.join(names) or 'none'}."


def own_line(error: BaseException, caller: str) -> str:
    """The last line outside of libraries in a traceback below the file `caller`, else the first, with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    called = [*itertools.takewhile(lambda frame: frame.filename != caller, reversed(frames))]
    own = next((frame for frame in called if not frame.filename.startswith(_INSTALLED)), called[-1] if called else None)
    return f"{own.filename}:{own.lineno}: {own.line}" if own else ""


def last_frames(error: BaseException) -> str:
    """The end of an error's traceback, and before an end in a library the last place outside of any."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    own = [frame for frame in frames[:-_FRAMES] if not frame.filename.startswith(_INSTALLED)]
    last = frames[-_FRAMES:]
    is_in_library = all(frame.filename.startswith(_INSTALLED) for frame in last)
    return "".join(traceback.format_list([*(own[-1:] if is_in_library else ()), *last])).rstrip()


def describe_error(error: BaseException) -> str:
    """Type and message of an exception, as records keep it."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}"[:2000] if text else type(error).__name__
