"""The models that are measured: the calc example's policy, and random weights in the shapes of models that people use.

Random weights have the speed and the memory of trained ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

POLICY = Path(__file__).parents[2] / "examples" / "calc" / "policy"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CONTEXT = 2048


@dataclass(frozen=True)
class Model:
    """One model; without a shape it is the calc example's policy."""

    name: str
    shape: Mapping[str, int] | None = None
    qwen: bool = False

    def folder(self, below: Path) -> Path:
        """Where its weights are; random ones are made there, in bfloat16, with the calc example's tokenizer."""
        if self.shape is None:
            return POLICY
        made = below / self.name.replace(" ", "-")
        if not made.exists():
            config = (Qwen2Config if self.qwen else LlamaConfig)(
                **self.shape, max_position_embeddings=CONTEXT, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0
            )
            torch.manual_seed(0)
            model = (Qwen2ForCausalLM if self.qwen else LlamaForCausalLM)(config)
            model.to(torch.bfloat16).save_pretrained(made)
            for name in TOKENIZER:
                shutil.copy(POLICY / name, made)
        return made


CALC = Model("calc policy, 0.9M")
SMALL_LLAMA = Model(
    "Llama, 135M",
    {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
     "num_attention_heads": 9, "num_key_value_heads": 3},
)  # fmt: skip
"""The shape of SmolLM2-135M."""
QWEN = Model(
    "Qwen2, 0.5B",
    {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
     "num_attention_heads": 14, "num_key_value_heads": 2},
    qwen=True,
)  # fmt: skip
"""The shape of Qwen2.5-0.5B."""
STAND_IN = Model(
    "Llama, 0.3M",
    {"vocab_size": 2048, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
     "num_attention_heads": 3, "num_key_value_heads": 1},
)  # fmt: skip
