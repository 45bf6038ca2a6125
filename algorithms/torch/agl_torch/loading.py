"""Loading a policy: any Hugging Face causal LM, its tokenizer, an adapter on the weights it belongs to."""

from __future__ import annotations

import copy
import functools
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.hub import cached_file

from agl_algorithms.fingerprints import BASE_FILE, check_targets, fingerprint_of
from agl_chat.conversation import end_ids, load_tokenizer
from agl_core.config.sections import LoraSection
from agl_core.errors import EngineError
from agl_core.protocols import PolicySpec
from agl_torch import attention
from agl_torch.grammars import Grammars

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
"""torch's names of the instructions that multiply bfloat16: two of x86, two of ARM."""


@dataclass(frozen=True)
class LoadedModel:
    """The weights of one policy, ready to sample and to train, and their tokenizer."""

    model: Any
    """A Hugging Face causal LM in eval mode; wrapped by peft if the policy trains a LoRA adapter."""
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    eos_ids: frozenset[int]
    """Every token id that ends a response."""
    context_length: int
    """Tokens of prompt and response together."""

    @property
    def has_adapter(self) -> bool:
        """Only the adapter is trained."""
        return hasattr(self.model, "peft_config")

    @property
    def size(self) -> int:
        """Number of weights."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @functools.cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.eos_ids, self.vocabulary)

    @property
    def vocabulary(self) -> int:
        """Number of ids that the model gives a probability to."""
        return int(self.model.get_output_embeddings().weight.shape[0])


class Bases:
    """Models below adapters, each loaded once: policies and critics on the same weights share its frozen tensors."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, str, bool, torch.device], LoadedModel] = {}

    def get(self, spec: PolicySpec, device: torch.device) -> LoadedModel:
        """The base of a policy without an adapter: modules of its own, which hold the shared parameters."""
        key = (spec.model, spec.dtype, spec.trust_remote_code, device)
        if key not in self._loaded:
            self._loaded[key] = _load(spec, device)
            self._loaded[key].model.requires_grad_(False)
        base = self._loaded[key]
        shared = {id(parameter): parameter for parameter in base.model.parameters()}
        return replace(base, model=copy.deepcopy(base.model, shared))


def load_model(spec: PolicySpec, device: torch.device, seed: int, bases: Bases | None = None) -> LoadedModel:
    """Load one policy; `seed` makes the adapter's initial weights, `bases` are shared with other adapters.

    The model stays in eval mode, in updates too: what is trained is what samples, without the noise of pretraining.
    With dtype auto, float16 weights become bfloat16 on a GPU and float32 on a CPU, since training in float16 overflows;
    bfloat16 weights become float32 on a CPU that does not multiply bfloat16. EngineError if the folder or hub name
    cannot be read, lacks a part or has parts that do not fit, or a saved adapter was trained on other weights.
    """
    if spec.adapter is None and spec.lora is None:
        return _load(spec, device)
    importlib.import_module("torch.distributed.tensor")  # peft names it, and takes it for imported.
    base = (bases or Bases()).get(spec, device)
    if spec.adapter is not None:
        adapted = _with_saved_adapter(base.model, Path(spec.adapter), spec)
    else:
        assert spec.lora is not None, "else there is nothing to adapt"
        adapted = _with_adapter(base.model, spec.lora, spec, seed)
    return replace(base, model=adapted.eval())


def _load(spec: PolicySpec, device: torch.device) -> LoadedModel:
    try:
        cached_file(spec.model, "config.json")  # An unreachable hub is reported once, not once for every file.
        tokenizer = load_tokenizer(spec.model, trust_remote_code=spec.trust_remote_code)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            spec.model,
            dtype=_dtype(spec, device),
            trust_remote_code=spec.trust_remote_code,
            output_loading_info=True,
        )
    except EngineError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise EngineError(
            f"The model '{spec.model}' cannot be loaded: {first_line(error)} Give the folder of a causal LM, with "
            f"config.json, the weights (*.safetensors) and tokenizer.json (a relative path starts at the configuration "
            f"file), or a name of the Hugging Face hub, such as 'Qwen/Qwen2.5-0.5B-Instruct', that can be reached."
        ) from error
    model, loading = loaded
    if loading["missing_keys"]:
        raise EngineError(
            f"The weights of '{spec.model}' are incomplete: {', '.join(sorted(loading['missing_keys'])[:3])} and "
            f"the like are missing. Copy or download the whole folder again."
        )
    rows, largest = model.get_input_embeddings().weight.shape[0], max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise EngineError(
            f"The tokenizer of '{spec.model}' knows the id {largest}, but its model has embeddings for {rows} ids "
            f"only: they do not belong together. Take both from the same checkpoint."
        )
    attention.use(model)
    model.to(device)
    return LoadedModel(
        model=model.eval(),
        tokenizer=tokenizer,
        device=device,
        dtype=next(model.parameters()).dtype,
        eos_ids=end_ids(model.generation_config, model.config, tokenizer),
        context_length=_context_length(model.config, tokenizer),
    )


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def _dtype(spec: PolicySpec, device: torch.device) -> torch.dtype | str:
    if spec.dtype != "auto":
        try:
            return _DTYPES[spec.dtype]
        except KeyError:
            raise EngineError(f"'{spec.dtype}' is no dtype to train in: use {', '.join(_DTYPES)} or auto.") from None
    config = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
    match str(getattr(config, "dtype", None)).removeprefix("torch."):
        case "float16":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        case "bfloat16" if device.type == "cpu" and not multiplies_bfloat16():
            return torch.float32
        case _:
            return "auto"


def multiplies_bfloat16() -> bool:
    """True if torch knows that the processor has instructions for it; otherwise it goes by way of float32, slower."""
    known: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(known.get(name) for name in _BFLOAT16)


def _with_adapter(model: Any, lora: LoraSection, spec: PolicySpec, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    check_targets(model, lora.targets)
    # Saved with the adapter and its model card: the base's folder on this machine is of no use elsewhere.
    model.name_or_path = model.config.name_or_path = spec.name or spec.model
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft only divides it by the rank
        target_modules=list(lora.targets),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            linear = sorted({path.rsplit(".", 1)[-1] for path, m in model.named_modules() if isinstance(m, nn.Linear)})
            raise EngineError(
                f"LoRA finds no layer of '{spec.model}' to adapt: lora.targets is {', '.join(lora.targets)}, "
                f"the model's linear layers are {', '.join(linear)}."
            ) from error


def _with_saved_adapter(model: Any, adapter: Path, spec: PolicySpec) -> Any:
    from peft import PeftModel

    name = spec.name or spec.model
    check_base(adapter, model, name)
    try:
        return PeftModel.from_pretrained(model, str(adapter), torch_device=str(model.device))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise EngineError(
            f"The adapter in {adapter} cannot be put on '{name}': {first_line(error)} Is the folder whole, and was "
            f"the adapter trained on these weights?"
        ) from error


def fingerprint(model: Any) -> str:
    """The fingerprint of a model's weights, without those of an adapter."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    tensors = {
        name.replace(".base_layer", ""): tensor for name, tensor in base.named_parameters() if "lora_" not in name
    }
    return fingerprint_of(tensors, tensors.__getitem__)


def check_base(adapter: Path, model: Any, name: str) -> None:
    """EngineError if a saved adapter has the fingerprint of other weights than the model's."""
    try:
        recorded = json.loads((adapter / BASE_FILE).read_text(encoding="utf-8")).get("fingerprint")
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError) as error:
        raise EngineError(f"{adapter / BASE_FILE} cannot be read: {error}. Restore the folder from a copy.") from error
    if recorded != fingerprint(model):
        raise EngineError(
            f"The adapter in {adapter} was trained on other weights than those of '{name}' now: their fingerprints "
            f"differ. Put the weights back that it was trained on, or name their folder."
        )


def _context_length(config: Any, tokenizer: Any) -> int:
    text = config.get_text_config()
    lengths = [getattr(text, "max_position_embeddings", None), tokenizer.model_max_length]
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        # Beyond this length all rows of a pass get other frequencies: a row would depend on its neighbours.
        if isinstance(parameters, Mapping) and parameters.get("rope_type") == "longrope":
            lengths.append(parameters["original_max_position_embeddings"])
    known = [int(length) for length in lengths if length is not None and 0 < length < 10**9]
    if not known:
        raise EngineError("The model does not say how long its context is. Set engine.torch.max_context.")
    return min(known)
