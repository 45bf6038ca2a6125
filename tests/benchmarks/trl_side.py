"""TRL's side of `trl_training.py`, and the evaluation of what both trained. Runs in the oracles' environment only.

python trl_side.py train settings.json       writes the model, and the rewards of the steps
python trl_side.py evaluate settings.json    writes the greedy reward of a model on the held-out tasks
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from agl_rewards import last_number

MICRO_BATCH = 32


def rewards(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 where the last number of a reply is the answer, as agl's `numeric_match` has it."""
    return [
        float(last_number(reply[0]["content"]) == last_number(expected))
        for reply, expected in zip(completions, answer, strict=True)
    ]


def train(settings: dict[str, Any]) -> Any:
    """The reward of each step."""
    rollouts = settings["groups"] * settings["members"]
    micro_batch = min(MICRO_BATCH, rollouts)
    config = GRPOConfig(
        output_dir=settings["out"],
        seed=settings["seed"],
        max_steps=settings["steps"],
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rollouts // micro_batch,
        num_generations=settings["members"],
        max_completion_length=settings["max_tokens"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dapo",  # every token of the batch counts alike: agl's token-mean
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
    )
    tasks = [
        {"prompt": [{"role": "user", "content": question}], "answer": answer} for question, answer in settings["tasks"]
    ]
    trainer = GRPOTrainer(settings["model"], rewards, args=config, train_dataset=Dataset.from_list(tasks))
    trainer.train()
    trainer.save_model(settings["out"])
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


@torch.inference_mode()
def evaluate(settings: dict[str, Any]) -> Any:
    """The share of the tasks whose most probable reply is right."""
    tokenizer: Any = AutoTokenizer.from_pretrained(settings["tokenizer"], padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    turns = [[{"role": "user", "content": question}] for question, _ in settings["tasks"]]
    asked = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**asked, max_new_tokens=settings["max_tokens"], do_sample=False)
    replies = tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [answer for _, answer in settings["tasks"]]
    found = rewards([[{"content": reply}] for reply in replies], answers)
    return sum(found) / len(found)


if __name__ == "__main__":
    place = Path(sys.argv[2])
    work = {"train": train, "evaluate": evaluate}[sys.argv[1]]
    place.with_suffix(".result").write_text(json.dumps(work(json.loads(place.read_text()))))
