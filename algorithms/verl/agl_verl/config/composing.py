"""veRL's configuration, made of agl's: composed by Hydra from veRL's own files.

Imports Hydra, but neither veRL nor torch: veRL's configuration is files, so it can be shown without starting anything.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agl_core.errors import ConfigError, EngineError, nearest
from agl_core.protocols import EngineContext
from agl_verl.config.chosen import BuiltAlgorithm
from agl_verl.config.mapping import mapped, model_engine, refuse_decided
from agl_verl.options import VerlOptions


def compose(options: VerlOptions, context: EngineContext, *, algorithm: BuiltAlgorithm, cpu: bool) -> DictConfig:
    """veRL's whole configuration for a run.

    ConfigError if an override means nothing to veRL, or is agl's to decide.
    """
    overrides = options.overrides
    for override in overrides:
        refuse_decided(override)
    own = [f"{_new(key)}{key}={_hydra(value)}" for key, value in mapped(options, context, algorithm, cpu)]
    with initialize_config_dir(config_dir=str(config_folder()), version_base=None):
        plain = _defaults(model_engine(options))
        try:
            composed = hydra_compose("ppo_trainer", overrides=[*own, *overrides])
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_explain(error, overrides, plain)) from error
    policy_loss = composed.actor_rollout_ref.actor.policy_loss
    if policy_loss.loss_mode == "dro" and not (policy_loss.dro_beta or 0) > 0:
        raise ConfigError(
            "veRL's policy loss 'dro' needs the weight of its penalty, for instance [engine.verl] overrides = "
            '["actor_rollout_ref.actor.policy_loss.dro_beta=0.1"].'
        )
    return composed


def differences(config: DictConfig) -> DictConfig:
    """What a run's configuration has that veRL's defaults do not, resolved."""
    with initialize_config_dir(config_dir=str(config_folder()), version_base=None):
        plain = _defaults(config.model_engine)
    values, defaults = (cast("dict[Any, Any]", OmegaConf.to_container(each, resolve=True)) for each in (config, plain))
    return OmegaConf.create(_other(values, defaults))


def _defaults(group: str) -> DictConfig:
    """veRL's, with one of its engines."""
    return hydra_compose("ppo_trainer", overrides=[f"model_engine={group}"])


def _other(values: Mapping[Any, Any], defaults: Mapping[Any, Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in values.items():
        default = defaults.get(key)
        if key in defaults and value == default:
            continue
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            found[key] = _other(value, default)
        else:
            found[key] = value
    return found


def config_folder() -> Path:
    """Where veRL keeps its configuration."""
    found = importlib.util.find_spec("verl")
    if found is None or found.origin is None:
        raise EngineError(
            "veRL is not installed, which engine.name = 'verl' needs: pip install 'agl-verl[gpu]', or 'agl-verl[cpu]' "
            "on a machine without a GPU."
        )
    return Path(found.origin).parent / "trainer" / "config"


def as_text(config: DictConfig) -> str:
    """The configuration as YAML, with every reference resolved."""
    text: str = OmegaConf.to_yaml(config, resolve=True)
    return text


_ADDED = (
    ".mixed_precision",
    ".override_config.",
    ".engine_kwargs.vllm.",
    ".enable_sleep_mode",
    ".lr_warmup_steps",
    ".load_contents",
    ".ppo_infer_max_token_len_per_gpu",
)


def _new(key: str) -> str:
    """`++` before a key that veRL's files may lack."""
    return "++" if any(part in key for part in _ADDED) else ""


def _hydra(value: Any) -> str:
    """A value as Hydra's command line has it."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_hydra(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_hydra, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _explain(error: Exception, overrides: tuple[str, ...], plain: DictConfig) -> str:
    reason = str(error).strip().split("\n", 1)[0]
    known = set(_keys(plain))
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0].strip()
        if key in reason or key.rpartition(".")[2] in reason:
            near = nearest(key, known).partition(" Known:")[0] if key not in known else ""
            hint = near if near.startswith("Did you mean") else "veRL's documentation lists its keys."
            return f"[engine.verl] overrides: '{override}' means nothing to veRL ({reason}). {hint}"
    return f"[engine.verl] overrides: {reason}"


def _keys(config: DictConfig, above: str = "") -> Iterator[str]:
    for key in config:
        name = f"{above}{key!s}"
        yield name
        below = OmegaConf.select(config, str(key), throw_on_missing=False) if not _is_reference(config, key) else None
        if isinstance(below, DictConfig):
            yield from _keys(below, f"{name}.")


def _is_reference(config: DictConfig, key: Any) -> bool:
    return bool(OmegaConf.is_interpolation(config, str(key)) or OmegaConf.is_missing(config, str(key)))
