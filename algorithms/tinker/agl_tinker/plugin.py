"""The engine `tinker`: its settings, and the run's side of it; `agl_tinker.process` speaks with the service.

Importing it imports neither torch nor the client: a configuration is checked without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from agl_core import Capability, hookimpl, kinds
from agl_core.config.sections import LoraSection
from agl_core.errors import ConfigError
from agl_core.kinds import Register
from agl_core.protocols import EngineContext
from agl_server.engines.host import ProcessEngine


class TinkerOptions(BaseModel):
    """Settings of the engine that trains on a service with the Tinker API."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    base_url: str | None = None
    """The service's address; absent: that of Tinker itself."""
    api_key_env: str = Field("TINKER_API_KEY", pattern=r"^\w+$")
    """The environment variable with the key."""
    base_model: str | None = None
    """The model's name at the service, for all policies; absent: each policy's `model.path`. The path then has the
    tokenizer, the chat template and the configuration alone."""
    max_context: int | None = Field(None, ge=16)
    """Longest prompt and response together, in tokens; absent: the model's own limit."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that the service may take for a reply or a part of an update."""


class TinkerEngine(ProcessEngine[TinkerOptions]):
    """LoRA adapters on a service: it samples and steps, and the algorithm's loss is computed here."""

    module = "agl_tinker.process"
    environment: ClassVar[Mapping[str, str]] = {"TINKER_TELEMETRY": "0"}

    def __init__(self, options: TinkerOptions, context: EngineContext) -> None:
        super().__init__(options, context)
        if context.deterministic:
            raise ConfigError("No service repeats a run bit for bit: set [train] deterministic = false.")
        for name, spec in context.policies.items():
            if spec.algorithm and spec.lora is None:
                raise ConfigError(
                    f"The policy '{name}' trains all weights, and a Tinker service trains adapters. "
                    f"Add [policies.{name}.model.lora]."
                )
            if spec.lora is not None and spec.lora.alpha != LoraSection().alpha:
                raise ConfigError(
                    f"The scale of an adapter is the service's own: leave policies.{name}.model.lora.alpha out."
                )
            if spec.algorithm_options.get("teacher_model"):
                raise ConfigError(
                    "A teacher is a model of the service: set 'teacher' to its name there or to a tinker:// path, and "
                    "leave 'teacher_model' out."
                )

    def describe(self) -> str:
        specs, place = self._context.policies.values(), self._options.base_url or "Tinker"
        models = sorted({self._options.base_model or spec.name or spec.model for spec in specs})
        return f"# Samples from and trains adapters of {', '.join(models)} at {place}; nothing runs on this machine.\n"


@hookimpl
def register_components(register: Register) -> None:
    provides = {
        Capability.TOKEN_IDS,
        Capability.REFERENCE,
        Capability.RECORDED_TEXTS,
        Capability.RESCORE,
        Capability.TARGET_KL,
        Capability.TEACHER,
    }
    needs = {Capability.UNIT_TEMPERATURE}
    register(kinds.ENGINE, "tinker", TinkerEngine, options=TinkerOptions, provides=provides, needs=needs)
