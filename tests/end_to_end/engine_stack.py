"""The whole stack for clients that block: a Lightning Server with a store, and the torch engine behind it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from transformers import AddedToken, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from agl_core.config.models import SamplingSection
from agl_core.protocols import EngineContext, PolicySpec
from agl_core.types import AttemptKey, Call
from agl_server.store.sqlite import SqliteStore
from agl_server.testing import Stack, running_stack
from agl_torch.plugin import TorchEngine, TorchOptions

CHAT_TEMPLATE = Path(__file__).parents[2] / "examples" / "chatml.jinja"
CONTEXT = 2048
MAX_TOKENS = 32
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_MARKS = ("<tool_call>", "</tool_call>")
NO_ARGUMENTS = " {}}\n" + TOOL_MARKS[1]
"""How a tool call without arguments goes on after the key of the arguments."""
TEXTS = (
    "Hello, how are you? What is the weather like in San Francisco today?",
    '{"name": "magic_function", "arguments":' + NO_ARGUMENTS,
    "user\nassistant\nsystem\nGrüße, 世界! The answer is 12 + 345 = 357.",
)


@dataclass(frozen=True)
class EngineStack:
    """The running stack; every method may be called from any thread but the stack's own."""

    stack: Stack
    tokenizer: PreTrainedTokenizerBase
    portal: BlockingPortal

    def lease(self) -> AttemptKey:
        """The attempt of a new rollout. All have one task: the n-th call of each has the same sampling seed."""
        return self.portal.call(self.stack.lease)

    def url(self, key: AttemptKey) -> str:
        return self.stack.url(key)

    def client(self, key: AttemptKey) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url(key), api_key=self.stack.key(key), max_retries=0)

    def calls(self, key: AttemptKey) -> list[Call]:
        return self.portal.call(self.stack.calls, key)


@contextlib.contextmanager
def engine_stack(folder: Path) -> Iterator[EngineStack]:
    """Make a policy in `folder` and serve it from a loop in a thread; the engine is a process of its own."""
    tokenizer = make_policy(folder / "policy")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(_serving(folder)) as stack:
        yield EngineStack(stack, tokenizer, portal)


@contextlib.asynccontextmanager
async def _serving(folder: Path) -> AsyncIterator[Stack]:
    policies = {"default": PolicySpec(str(folder / "policy"))}
    context = EngineContext(folder, 0, policies, deterministic=False, plugin_files=(), api_key="the-engine's-key")
    engine = TorchEngine(TorchOptions(threads=1, cache_mib=32), context)
    try:
        upstream = await engine.start()
        async with (
            SqliteStore(folder / "store.sqlite") as store,
            running_stack(
                store=store, upstream=upstream, sampling=SamplingSection(max_tokens=MAX_TOKENS), seed=0, timeout=300
            ) as stack,
        ):
            yield stack
    finally:
        await engine.stop()


def make_policy(folder: Path) -> PreTrainedTokenizerBase:
    """Write a tiny Qwen2 with random weights and a few habits, and return its tokenizer.

    It babbles, bytes that are no characters among it, but now and then a full stop comes, and with it the reply ends.
    So no reply is empty, some end by themselves, and some are cut short. A tool call that was begun for it, up to the
    arguments, it finishes without any.
    """
    tokenizer = _make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
        _give_habits(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


@torch.no_grad()
def _give_habits(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set input and output weights so that some tokens follow some others, and nothing else, almost surely."""
    read, write = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    constant = 0  # a hidden dimension that is alike for every token: output weights of it are biases
    read.normal_()
    read[:, constant] = 4
    write[:, constant] = 0
    end = tokenizer.eos_token_id
    (full_stop,) = tokenizer.encode(".", add_special_tokens=False)
    no_arguments = tokenizer.encode('":' + NO_ARGUMENTS, add_special_tokens=False)
    assert len(set(no_arguments)) == len(no_arguments), "a habit is what follows one token"
    write[full_stop] = 0
    write[full_stop, constant] = 0.85  # about every twentieth token
    followers = [*tokenizer.all_special_ids, *no_arguments[1:]]
    write[followers] = 0
    for token, follower in ((full_stop, end), *pairwise([*no_arguments, end])):
        write[follower] += read[token]
    write[followers, constant] = -7


def _make_tokenizer() -> PreTrainedTokenizerBase:
    """Qwen2's own tokenizer with a vocabulary of every byte and some pieces of `TEXTS`."""
    stock = Qwen2Tokenizer(eos_token=TURN_END, pad_token=END_OF_TEXT, model_max_length=CONTEXT)
    tokenizer: PreTrainedTokenizerBase = stock.train_new_from_iterator(
        TEXTS * 3, 340, new_special_tokens=[TURN_START, TURN_END], show_progress=False
    )  # type: ignore[no-untyped-call]
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in TOOL_MARKS])
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    return tokenizer
