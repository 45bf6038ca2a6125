"""TRL itself trains on what `agl export` writes, as it is; `make oracles` runs this."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from agl_core.testing import episodes as make
from agl_core.types import Reward, RolloutState, Run
from agl_server.reading.export import Format, export_run

from ..support.testing_aids import write_store

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Of characters, so that all that is in a conversation is in the text."""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SETTINGS: dict[str, Any] = {
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "max_length": 1024,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty groups of two: one rollout asks for a tool, with arguments of its own names, and is right."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    (folder / "config.toml").write_text("config_version = 1\n[capture]\n")
    records: list[Any] = [Run("run", 0, 0.0, {})]
    for group in range(20):
        question = {"role": "user", "content": f"how many, {group}?"}
        for member in range(2):
            name = f"g{group}-m{member}"
            done = {"state": RolloutState.DONE, "counted_attempt": 0}
            records += [make.rollout(name, run="run", group=f"g{group}", member=member, step=1, **done)]
            records += [make.attempt(name), Reward(name, 0, "right", float(member), "right")]
            request = {"messages": [question], "tools": TOOLS}
            reply = {"role": "assistant", "content": "none"}
            if member:
                function = {"name": "add", "arguments": json.dumps({f"a{group}": group, "b": None})}
                tool_calls = [{"id": "t", "type": "function", "function": function}]
                reply = {"role": "assistant", "content": None, "tool_calls": tool_calls}
                answered = [question, reply, {"role": "tool", "tool_call_id": "t", "content": "3"}]
                last = make.choice(message={"role": "assistant", "content": "three"})
                then = make.call(1, last, rollout=name, request={"messages": answered, "tools": TOOLS})
                records.append(then)
            records.append(make.call(0, make.choice(message=reply), rollout=name, request=request))

    write_store(folder / "store.sqlite", *records)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedTokenizerFast]:
    characters = ["<pad>", "<eos>", *map(chr, range(32, 127))]
    words = Tokenizer(WordLevel({character: n for n, character in enumerate(characters)}, unk_token="<pad>"))
    words.pre_tokenizer = Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen2Config(vocab_size=len(characters), num_key_value_heads=1, **shape)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder), tokenizer


def trained(
    trainer: Any, config: Any, to: Format, run: Path, checkpoint: tuple[str, Any], folder: Path
) -> tuple[Dataset, Any]:
    """The exported data, and TRL's trainer after a step on it."""
    file = folder / f"{to.value}.jsonl"
    asyncio.run(export_run(run, to, file))
    data = load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "cache"))
    assert isinstance(data, Dataset)
    model, tokenizer = checkpoint
    arguments = config(output_dir=str(folder / "out"), **SETTINGS)
    trainer = trainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    assert trainer.train().training_loss > 0
    return data, trainer


def test_the_sft_trainer_takes_it(run: Path, checkpoint: tuple[str, Any], tmp_path: Path) -> None:
    data, trainer = trained(SFTTrainer, SFTConfig, Format.SFT, run, checkpoint, tmp_path)
    assert len(data) == 60
    texts = ["".join(checkpoint[1].convert_ids_to_tokens(row["input_ids"])) for row in trainer.train_dataset]
    # Each call has its own arguments and no others, and the tools are in the prompt.
    assert any('"arguments": {"a7": 7, "b": null}}' in text or '{"a7": 7, "b": null}' in text for text in texts)
    assert all('"name": "add"' in text for text in texts)


def test_the_dpo_trainer_takes_it(run: Path, checkpoint: tuple[str, Any], tmp_path: Path) -> None:
    data, _ = trained(DPOTrainer, DPOConfig, Format.PREFERENCES, run, checkpoint, tmp_path)
    assert len(data) == 20
    assert data[3]["rejected"] == [{"role": "assistant", "content": "none"}]
    assert data[3]["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {"a3": 3, "b": None}
