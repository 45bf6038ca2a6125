"""Functions of the user that a setting names as `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator

from agl_core.errors import ConfigError


def _is_name(entry: str) -> str:
    module, _, function = entry.partition(":")
    if not module or not function:
        raise ValueError("must be 'module:function', for instance 'my_rules:http_ok'")
    return entry


FunctionName: TypeAlias = Annotated[str, AfterValidator(_is_name)]
"""A setting that names a function; `load_function` checks whether it exists."""


def load_function(entry: str, setting: str) -> Callable[..., Any]:
    """The function that `setting` names; ConfigError if there is none.

    >>> load_function("math:sqrt", "rules.root")(9)
    3.0
    """
    module_name, _, name = entry.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(
            f"{setting} = '{entry}' cannot be imported ({type(error).__name__}: {error}). It must be "
            f"'module:function'; a module beside the configuration is found if `plugins` names a file there."
        ) from error
    if not callable(found):
        raise ConfigError(f"{setting} = '{entry}' is a {type(found).__name__}, not a function.")
    return found  # type: ignore[no-any-return]
