"""The tiny policies' folders: every loader encodes as the warm-up did, and each recipe makes the shipped tokenizer."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from imitation import CHAT_TEMPLATE, EXAMPLES, MARKS, collate, imitation_step, make_tokenizer
from recipes import Demonstrations, Message, Shape
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

FOLDER = Path(__file__).parents[1]


class Made(NamedTuple):
    """A policy's folder and what it was made of."""

    folder: Path
    shown: Demonstrations
    shape: Shape
    tokenizer: Any

    def conversations(self) -> Iterator[list[Message]]:
        return (self.shown.conversation(seed, index) for seed in (0, 9) for index in range(100))


QUICKLY_MADE = ("calc", "beds")
"""Whose tokenizers are trained in a second; the others take five and differ in their texts alone."""


@pytest.fixture(scope="module", params=EXAMPLES)
def made(request: pytest.FixtureRequest) -> Made:
    recipe = importlib.import_module(f"make_{request.param}").RECIPE
    folder = FOLDER / request.param / "policy"
    return Made(folder, recipe.shown, recipe.shape, AutoTokenizer.from_pretrained(folder))


def test_every_loader_encodes_as_the_warm_up_did(made: Made) -> None:
    """transformers picks a class by the model type: here it must not matter which."""
    core = Tokenizer.from_file(str(made.folder / "tokenizer.json"))
    generic = PreTrainedTokenizerFast.from_pretrained(made.folder)
    for messages in made.conversations():
        trained_with, _ = made.shown.encode(made.tokenizer, messages)
        whole = made.shown.render(made.tokenizer, messages).removesuffix("\n")
        assert made.tokenizer.encode(whole, add_special_tokens=False) == trained_with
        assert generic.encode(whole, add_special_tokens=False) == trained_with
        assert core.encode(whole, add_special_tokens=False).ids == trained_with
        assert made.tokenizer.decode(trained_with) == generic.decode(trained_with) == whole


@pytest.mark.parametrize(
    "made",
    [name if name in QUICKLY_MADE else pytest.param(name, marks=pytest.mark.storm) for name in EXAMPLES],
    indirect=True,
)
def test_the_recipe_makes_the_shipped_tokenizer(made: Made) -> None:
    fresh = make_tokenizer(made.shown, made.shape.vocabulary, seed=0)
    assert fresh.get_vocab() == made.tokenizer.get_vocab()
    assert fresh.chat_template == made.tokenizer.chat_template == CHAT_TEMPLATE.read_text()
    for messages in made.conversations():
        assert made.shown.encode(fresh, messages) == made.shown.encode(made.tokenizer, messages)


def test_logits_at_labels_alone_give_the_loss_and_the_gradients_of_all_logits() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).double()  # type: ignore[no-untyped-call]
    # More rows than a part has, of different lengths; the first token is never a label.
    rows = [
        (torch.randint(40, (length,)).tolist(), [place % 3 > 0 for place in range(length)]) for length in range(2, 22)
    ]
    for everything in (True, False):
        model.zero_grad()
        loss = imitation_step(model, rows, everything)
        found = {name: each.grad.clone() for name, each in model.named_parameters()}
        model.zero_grad()
        ids_BT, labels_BT = collate(rows, everything)
        plain = model(input_ids=ids_BT, labels=labels_BT).loss
        plain.backward()
        assert loss == pytest.approx(plain.item(), rel=1e-6)
        for name, each in model.named_parameters():
            torch.testing.assert_close(found[name], each.grad, rtol=1e-5, atol=1e-7)


def test_digits_are_single_and_marks_are_text(made: Made) -> None:
    assert made.tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    for mark in (*MARKS, *made.shown.phrases, *made.shown.names):
        [token] = made.tokenizer.encode(mark, add_special_tokens=False)
        assert made.tokenizer.decode([token], skip_special_tokens=True) == mark
    ends = made.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert ends == [made.tokenizer.eos_token_id]
    assert made.tokenizer.decode(ends, skip_special_tokens=True) == ""
