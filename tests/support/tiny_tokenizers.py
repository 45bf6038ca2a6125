"""Hand-made tokenizers with the chat templates of two architectures."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (Path(__file__).parents[2] / "examples" / "chatml.jinja").read_text()

LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}<|start_header_id|>assistant<|end_header_id|>

{% set call = message.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if loop.index0 == 0 and tools %}Respond with {"name": NAME, "parameters": OBJECT}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{{ message.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

TEXTS = [
    "What is 12 plus 345?",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+345"}}\n</tool_call>',
    "Tom has 5 apples and don't  want\t7 more.\n\nThe answer is 42.",
    "Grüße, 世界! 1234567890",
]


QWEN_TOKENS = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>"]
LLAMA_TOKENS = [
    "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>", "<|python_tag|>"
]  # fmt: skip


def make_tokenizer(architecture: str, template: str | None = "own") -> PreTrainedTokenizerFast:
    """A hand-made byte-level BPE of 320 tokens that splits digits, unlike the stock tokenizer of any architecture."""
    specials = QWEN_TOKENS if architecture == "qwen2" else LLAMA_TOKENS
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=specials[0], eos_token=specials[1], pad_token=specials[0]
    )
    own = CHATML if architecture == "qwen2" else LLAMA
    tokenizer.chat_template = own if template == "own" else template
    return tokenizer
