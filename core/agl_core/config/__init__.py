"""How a run is described: reading its TOML file, and checking that its parts go together."""

from agl_core.config.check import check
from agl_core.config.load import LoadedConfig, dump, load
from agl_core.config.models import RunConfig
from agl_core.config.resolve import Chosen

__all__ = ["Chosen", "LoadedConfig", "RunConfig", "check", "dump", "load"]
