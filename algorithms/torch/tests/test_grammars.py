"""Replies of a given form have it, and training knows the log-probabilities that sampling had, and their gradient."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import numpy as np
import openai
import pydantic
import pytest
import regex
import torch
from tiny_tokenizers import make_tokenizer
from torch import Tensor

from agl_chat.api import ModelServer, create_app
from agl_chat.backends import Generation, Request
from agl_chat.conversation import ChatText
from agl_core.learning.transitions import grammar_of
from agl_core.testing.engines import Row, batch_of
from agl_core.types import Batch, FinishReason
from agl_torch.batching import Limits, micro_batches, score
from agl_torch.loading import LoadedModel
from agl_torch.process import EngineLoop
from agl_torch.sampler import Sampler

from .conftest import Loaded, distributions, drive, grpo, random_ids, trainer_of

SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer"},
        "why": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["sum", "difference", None]},
        "digits": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["answer", "kind", "digits"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
CHOICES = ["yes", "no, never", "日本\n\"é'\\"]
PATTERN = r"(ab|a[0-9]{2})+/\w{1,3} é"


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "json_schema": ({"response_format": FORMAT}, is_json),
    "guided_json": ({"guided_json": json.dumps(SCHEMA)}, is_json),
    "regex": ({"structured_outputs": {"regex": PATTERN}}, lambda text: regex.fullmatch(PATTERN, text)),
    "choice": ({"guided_choice": CHOICES}, CHOICES.__contains__),
    "grammar": ({"guided_grammar": 'root ::= "x" ("y" | "z")+ [0-9]'}, lambda text: regex.fullmatch("x[yz]+\\d", text)),
}  # fmt: skip


def sample(
    loaded: Loaded, fields: dict[str, Any], *, n: int = 6, temperature: float = 0.7, free: int = 2
) -> Generation:
    """Replies of a form, sampled together with `free` ones."""
    prompt = random_ids(loaded, 20, 0)
    formed = Request("formed", prompt, 200, n, temperature, seed=3, grammar=grammar_of(fields))
    return drive(Sampler(loaded), [replace(formed, id="free", grammar=None, n=free), formed])["formed"]


def batch_from(generated: Generation) -> Batch:
    request = generated.request
    rows = [Row(request.prompt_ids, r.ids, r.logprobs, float(i % 2)) for i, r in enumerate(generated.responses)]
    masks = [np.array([token.is_free for token in r.tokens]) for r in generated.responses]
    grammars = np.array([request.grammar] * len(rows), np.object_)
    batch = batch_of(rows, temperature=request.temperature)
    return replace(batch, grammar_N=grammars, mask_R=np.concatenate(masks))


def texts(loaded: Loaded, generated: Generation) -> list[str]:
    """Those of the replies that ended by themselves, without end tokens."""
    ended = [r.ids.tolist() for r in generated.responses if r.finish_reason is FinishReason.STOP]
    return [loaded.tokenizer.decode([i for i in ids if i not in loaded.eos_ids]) for ids in ended]


@pytest.mark.parametrize("name", FORMS)
def test_replies_have_the_form_and_training_knows_their_log_probabilities(qwen: Loaded, name: str) -> None:
    fields, fits = FORMS[name]
    generated = sample(qwen, fields)
    replies = texts(qwen, generated)
    assert len(replies) >= 3
    assert all(map(fits, replies))
    batch = batch_from(generated)
    trainer = trainer_of(qwen, tokens_per_micro_batch=4096)
    np.testing.assert_allclose(trainer.logprobs(batch).logprobs_R, batch.behaviour_logprobs_R, rtol=0, atol=1e-5)
    assert not batch.mask_R.all()
    assert (batch.behaviour_logprobs_R[~batch.mask_R] == 0).all()
    assert (batch.behaviour_logprobs_R[batch.mask_R] < 0).any()


def test_log_probabilities_are_among_the_tokens_that_a_partial_match_allows(qwen: Loaded) -> None:
    """By a plain forward pass, and by the module `regex`, which knows what can still become a match."""
    pattern = "(ab|a[0-9]{2})+/[xyz]{1,3} ok"
    generated = sample(qwen, {"structured_outputs": {"regex": pattern}})
    pieces = [qwen.tokenizer.decode([token]) for token in range(len(qwen.tokenizer))]
    for choice, response in enumerate(generated.responses):
        before = ""
        for at, (token, logprobs_V) in enumerate(
            zip(response.ids, distributions(qwen, generated, choice), strict=True)
        ):
            ends = regex.fullmatch(pattern, before)
            going_on = [i for i, piece in enumerate(pieces) if regex.fullmatch(pattern, before + piece, partial=True)]
            allowed = [*(i for i in going_on if i not in qwen.eos_ids), *(qwen.eos_ids if ends else ())]
            expected = logprobs_V[token] - torch.logsumexp(logprobs_V[allowed], 0)
            assert response.logprobs[at] == pytest.approx(float(expected), abs=1e-5)
            assert response.tokens[at].is_free == (len(allowed) > 1)
            before += pieces[token]


ADD = {"type": "object", "properties": {"x": {"type": "integer"}, "why": {"type": "string"}}, "required": ["x"]}
ODD = {"type": "object", "properties": {"x": {"type": "string", "format": "odd"}}, "not": {}}
TOOLS = [
    {"type": "function", "function": {"name": name, **more}}
    for name, more in {"add": {"parameters": ADD}, "now": {}, "odd": {"parameters": ODD}}.items()
]


def call_texts(template: str) -> dict[str, bool]:
    """Replies in the format of a template, and whether they are calls of the tools above."""
    if template == "xml":
        begin, end, written = "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", XML_ARGUMENTS
    elif template == "json":
        begin, end, written = '{"name": "NAME", "parameters": ', "}", JSON_ARGUMENTS
    else:
        begin, end, written = '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", JSON_ARGUMENTS
    calls = {
        f"{begin.replace('NAME', name)}{text}{end}": is_valid
        for name, arguments in written.items()
        for text, is_valid in arguments.items()
    }
    first, *_, last = (text for text, is_valid in calls.items() if is_valid)
    between = "; " if template == "json" else "\n"
    return {**calls, f"{first}{between}{last}": True, first[: len(first) // 2]: False}


JSON_ARGUMENTS = {
    "add": {'{"x": 1}': True, '{"x": 1, "why": "a < b"}': True, '{"x": "one"}': False, "{}": False},
    "now": {"{}": True},
    "odd": {'{"x": "y"}': True},
    "none": {"{}": False},
}
XML_ARGUMENTS = {
    "add": {
        "<parameter=x>\n1\n</parameter>\n": True,
        "<parameter=x>\n1\n</parameter>\n<parameter=why>\na </b>\n</parameter>\n": True,
        "<parameter=x>\none\n</parameter>\n": False,
        "": False,
    },
    "now": {"": True, "<parameter=any>\n1\n</parameter>\n": True},
    "none": {"": False},
}


@pytest.mark.parametrize("template", ["hermes", "xml", "json"])
def test_calls_instead_of_a_form_are_held_to_the_tools(qwen: Loaded, template: str) -> None:
    forced = {"response_format": FORMAT, "tools": TOOLS, "tool_choice": "required"}
    assert grammar_of(forced) is None
    grammar = grammar_of({"response_format": FORMAT, "tools": TOOLS})
    tokenizer = make_tokenizer(
        "qwen2", {"xml": "<tool_call><function=", "json": '"parameters" ipython'}.get(template, "own")
    )
    grammars, encode = replace(qwen, tokenizer=tokenizer).grammars, tokenizer.encode
    content = '{"answer": 1, "kind": null, "digits": []}'
    for text, is_valid in {**call_texts(template), content: True, "I think": False, "</tool_call>": False}.items():
        ids = np.array([*encode(text), tokenizer.eos_token_id], np.int32)
        masks = grammars.masks(grammar, random_ids(qwen, 20, 0), ids)
        assert (not (masks == 255).all()) == is_valid, text
    replies = (
        texts(qwen, sample(qwen, {"response_format": FORMAT, "tools": TOOLS}, n=12)) if template == "hermes" else []
    )
    for text in replies:
        parsed = ChatText(qwen.tokenizer, qwen.eos_ids).parser(TOOLS).parse(text)
        assert not parsed.error
        assert parsed.calls or is_json(text)


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_before_a_form_is_free(qwen: Loaded, opened: bool) -> None:
    tokenizer = make_tokenizer("qwen2", "own")
    tokenizer.chat_template = "{{ '</think>' }}" + tokenizer.chat_template
    thinking = replace(qwen, tokenizer=tokenizer)
    begin = tokenizer.encode("<think>\n")
    prompt = np.array([5, 6, *begin] if opened else [5, 6], np.int32)
    grammar = grammar_of({"guided_choice": ["yes"]})
    inside = [] if opened else begin
    thought = np.array([*inside, *tokenizer.encode("Hm, yes?\n</think>\n\nyes")], np.int32)
    masks = thinking.grammars.masks(grammar, prompt, thought)
    assert np.bitwise_count(masks[len(inside) + 1]).sum() > 200
    assert np.bitwise_count(masks[-1]).sum() <= 2
    plain = np.array(tokenizer.encode("yes"), np.int32)
    is_plain = np.bitwise_count(thinking.grammars.masks(grammar, prompt, plain)).sum(1) < 200
    assert is_plain.all() == (not opened)


def test_a_reply_that_was_not_held_to_its_form_is_scored_as_it_was_sampled(qwen: Loaded) -> None:
    generated = sample(qwen, {})
    batch = batch_from(generated)
    formed = replace(batch, grammar_N=np.full(len(batch), grammar_of({"response_format": FORMAT}), np.object_))
    np.testing.assert_allclose(
        trainer_of(qwen).logprobs(formed).logprobs_R, batch.behaviour_logprobs_R, rtol=0, atol=1e-5
    )


def test_a_reply_that_was_held_to_its_form_by_other_tokens_is_not_held_to_ours(qwen: Loaded) -> None:
    """Another server may spell a text that has to come in any tokens."""
    grammar, text = grammar_of({"guided_choice": ["fifteen apples", "12"]}), "fifteen apples"
    encode, prompt = qwen.tokenizer.encode, np.array([5, 6], np.int32)
    usual = np.array(encode(text), np.int32)
    letters = np.array([token for letter in text for token in encode(letter)], np.int32)
    assert len(letters) > len(usual)
    assert np.bitwise_count(qwen.grammars.masks(grammar, prompt, usual)).sum(1).max() < 50
    assert (qwen.grammars.masks(grammar, prompt, letters) == 255).all()


STEP = 2e-4
"""Not smaller: the norms of the model compute in float32."""


@pytest.mark.parametrize("part", [None, 7])
def test_the_gradient_under_a_form_is_that_of_finite_differences(
    qwen: Loaded, in_float64: LoadedModel, monkeypatch: pytest.MonkeyPatch, part: int | None
) -> None:
    """Also where logits exist for a part of the positions at a time, and beside replies without a form."""
    model = in_float64.model
    if part:
        monkeypatch.setattr("agl_torch.batching.LOGITS_AT_ONCE", part * in_float64.vocabulary)
    batch = batch_from(sample(qwen, {"response_format": FORMAT}, n=3))
    batch.grammar_N[1] = None
    trainer = trainer_of(in_float64)
    weights_R = torch.from_numpy(np.random.default_rng(0).normal(size=len(batch.mask_R)))

    def weighted() -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for micro in micro_batches(batch, np.arange(len(batch)), Limits.of(model, 4096), torch.device("cpu")):
            scores = score(model, micro, trainer.allowed(batch, micro))
            total = total + (weights_R[micro.tokens_R] * scores.logprobs_R).sum()
        return total

    weighted().backward()  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(1)
    for parameter in list(model.parameters())[::5]:
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        values = []
        with torch.no_grad():
            for shift in (STEP, -2 * STEP):
                parameter += shift * direction
                values.append(weighted())
            parameter += STEP * direction
        expected = float((values[0] - values[1]) / (2 * STEP))
        assert float((parameter.grad * direction).sum()) == pytest.approx(expected, rel=2e-3)


def test_an_update_trains_on_replies_of_a_form(qwen: Loaded) -> None:
    loaded = replace(qwen, model=copy.deepcopy(qwen.model))
    generated = sample(loaded, {"response_format": FORMAT}, free=0)
    initial = replace(loaded, model=copy.deepcopy(loaded.model))
    trainer = trainer_of(loaded, tokens_per_micro_batch=4096, initial=lambda: initial)
    result = trainer.update(batch_from(generated), grpo(beta=0.1))
    assert result.metrics["transitions_trained"] == len(generated.responses)
    assert result.metrics["logprob_gap_max"] < 1e-5


class Sum(pydantic.BaseModel):
    answer: int
    digits: list[bool]


async def test_clients_that_ask_for_a_form_get_it(qwen: Loaded) -> None:
    loop = EngineLoop({"m": Sampler(qwen)}, pytest.fail)
    loop.start()
    served = ModelServer("m", ChatText(qwen.tokenizer, qwen.eos_ids), qwen.context_length)
    transport = httpx.ASGITransport(create_app({"m": served}, loop, api_key="key"))
    async with openai.AsyncOpenAI(
        base_url="http://engine/v1", api_key="key", http_client=httpx.AsyncClient(transport=transport)
    ) as client:
        more: Any = {"model": "m", "messages": [{"role": "user", "content": "What is 12 plus 30?"}]}
        parsed = await client.chat.completions.parse(
            **more, response_format=Sum, seed=1, extra_body={"return_token_ids": True}
        )
        choice = parsed.choices[0]
        assert isinstance(choice.message.parsed, Sum)
        assert False in parsed.model_extra["agl"]["choices"][0]["mask"]
        likely = await client.chat.completions.create(
            **more, logprobs=True, top_logprobs=9, extra_body={"guided_choice": ["a", "b"]}
        )
        assert likely.choices[0].message.content in ("a", "b")
        assert len(likely.choices[0].logprobs.content[0].top_logprobs) == 2  # type: ignore[index]
        for wrong in ({"guided_regex": "a("}, {"structured_outputs": {"structural_tag": "x"}}, {"guided_json": "{"}):
            with pytest.raises(openai.BadRequestError, match="cannot be enforced"):
                await client.chat.completions.create(**more, extra_body=wrong)
