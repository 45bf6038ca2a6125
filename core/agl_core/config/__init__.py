"""How a run is described: reading its TOML file, and checking that its parts go together."""

from agl_core.config.check import check
from agl_core.config.load import CONFIG_FILE, LoadedConfig, load, store_config
from agl_core.config.models import RunConfig
from agl_core.config.resolve import Chosen, PolicyPlan

__all__ = [
    "CONFIG_FILE",
    "Chosen",
    "LoadedConfig",
    "PolicyPlan",
    "RunConfig",
    "check",
    "load",
    "store_config",
]
