"""Replies of a given form: which tokens a grammar allows next, while a reply is sampled and when it is trained on.

A request's format (a JSON schema, a regular expression, choices, a grammar) is about the content of a reply. Reasoning
before it is free. If tools are offered, calls of them may stand instead, which are held to the tools' schemas. The
policy of such a reply is the model's distribution over the allowed tokens: its log-probabilities are normalised over
these alone, and a token that was the only one allowed is no decision.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_chat.conversation import ChatText
from agl_chat.parsing import ToolFormat, types_of
from agl_core.apis.dialect import wrong
from agl_core.types import Tokens

if TYPE_CHECKING:  # Importing it takes a while, and few runs need it.
    import llguidance

MAX_KEPT = 16
"""Compiled grammars, of up to 70 MB each."""
_SPACES = {"whitespace_pattern": r" |\n( {0,32}|\t{0,8})"}
"""A space, or a new line and its indentation: with any space allowed, a poor policy fills its token limit with it."""
_TAIL = 16
"""Prompt tokens in which the tag that begins reasoning is looked for."""

PackedMask = NDArray[np.uint8]
"""[W] bytes: bit i % 8 of byte i // 8 says whether token i is allowed."""


class Constraint:
    """One reply under its grammar, as far as it is sampled."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int) -> None:
        self._matcher, self._width = matcher, -(-vocabulary // 8)
        self._allowed = self._mask()
        self.pending: Future[None] | None = None
        """Computes the next mask."""

    @property
    def allowed(self) -> PackedMask:
        """The tokens that may come next."""
        if self.pending is not None:
            self.pending.result()
        return self._allowed

    def accept(self, token: int) -> bool:
        """Go on by an allowed token; False if the grammar does not allow it."""
        accepted: bool = self._matcher.consume_token(token)
        self._allowed = self._mask()
        return accepted

    def _mask(self) -> PackedMask:
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: self._width]


class Grammars:
    """The grammars of one model's replies: JSON as `agl_core.learning.transitions.grammar_of` gives it.

    `vocabulary` is how many logits the model has. Compiled grammars are kept; compiling may take long, and any thread
    may do it.
    """

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int], vocabulary: int) -> None:
        self._text, self._tokenizer = ChatText(tokenizer, frozenset(eos_ids)), tokenizer
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, "agl-grammars")
        self._compiled: Callable[[str, bool], llguidance.LLMatcher] = functools.lru_cache(MAX_KEPT)(self._compile)

    def start(self, grammar: str, prompt_ids: Tokens) -> Constraint:
        """A reply to this prompt. Raises ApiError for a grammar that cannot be enforced, with the reason."""
        is_thinking = self._text.is_thinking(self._text.decode(prompt_ids[-_TAIL:].tolist()))
        return Constraint(self._compiled(grammar, is_thinking).deep_copy(), self._vocabulary)

    def advance(self, sampled: Sequence[tuple[Constraint, int]]) -> None:
        """Go on by a token each, on a thread: the model can compute the logits of the next one meanwhile."""

        def accept_all() -> None:
            for constraint, token in sampled:
                constraint.accept(token)

        pending = self._thread.submit(accept_all)
        for constraint, _ in sampled:
            constraint.pending = pending

    def masks(self, grammar: str | None, prompt_ids: Tokens, response_ids: Tokens) -> NDArray[np.uint8]:
        """[T, W] what was allowed at each token of a response.

        All tokens, if there is no grammar, or the response does not follow it: its model server did not enforce it.
        """
        every = np.full((len(response_ids), -(-self._vocabulary // 8)), 255, np.uint8)
        if grammar is None:
            return every
        constraint, rows = self.start(grammar, prompt_ids), []
        for token in response_ids.tolist():
            rows.append(constraint.allowed)
            # Of a text that has to come, only its usual tokens are allowed, but any are accepted.
            is_allowed = token // 8 < len(rows[-1]) and rows[-1][token // 8] >> token % 8 & 1
            if not (is_allowed and constraint.accept(token)):
                return every
        return np.stack(rows)

    def _compile(self, grammar: str, is_thinking: bool) -> llguidance.LLMatcher:
        import llguidance

        try:
            matcher = llguidance.LLMatcher(self._tokens, self._whole(json.loads(grammar), is_thinking), log_level=0)
            error = matcher.get_error()
        except (ValueError, TypeError, KeyError, AttributeError) as unreadable:
            error = str(unreadable)
        if error:
            problem = f"cannot be enforced: {error.strip().splitlines()[0]}. Ask for a simpler one"
            raise wrong("response_format", problem, code="invalid_value")
        return matcher

    def _whole(self, form: dict[str, Any], is_thinking: bool) -> str:
        """A grammar of the whole reply, for llguidance: reasoning, and what the form says or a tool call."""
        functions, content = form.pop("or_call", None), _content(form)
        tags, tool_format = self._text.thinking, self._text.tool_format if isinstance(functions, dict) else None
        if tags is None and tool_format is None:
            return json.dumps({"grammars": [content]})
        lines, start = ["TEXT: /(?s:.+)/", r"SPACE: /[ \n]{0,4}/"], "@content"
        if tool_format is not None:
            lines += self._calls(tool_format, functions)
            start = "(@content | calls)"
        if tags is not None:
            lines.append(self._until("reasoning", tags.last))
            first = "reasoning SPACE" if is_thinking else f"({self._literal(tags.first)} reasoning SPACE)?"
            start = f"{first} {start}"
        top = "\n".join([f"start: {start}", *lines])
        return json.dumps({"grammars": [{"lark_grammar": top}, {**content, "name": "content"}]})

    def _calls(self, tool_format: ToolFormat, functions: Mapping[str, Any]) -> Iterator[str]:
        """The rules of one tool call or several. Arguments that are no JSON come in the order of the schema."""
        (first, head), (end, again, last), literal = tool_format.start, tool_format.ends, self._literal
        is_json = first.startswith("{")
        yield f"calls: {'' if is_json else literal(first)} call ({literal(again)} call)* {literal(last)}"
        yield f"call: {' | '.join(f'call{number}' for number in range(len(functions)))}"
        for number, (name, schema) in enumerate(functions.items()):
            begin = literal(head.replace("NAME", name).removesuffix("{"))
            objects = {"type": "object", **schema}, {"type": "object"}
            if is_json:  # Content may be too: with texts of its own, the call would take content's first characters.
                begin, arguments = "", _json(*(_whole_call(name, described) for described in objects))
            elif tool_format.pair is not None:
                arguments = self._pairs(*tool_format.pair, schema)
            else:
                arguments = ('" " ' if head.endswith(":") else "") + _json(*objects)
            yield f"call{number}: {begin} {arguments} {literal(end)}"
        if tool_format.pair is not None:
            yield "KEY: /[^<>\\n]+/"
            yield self._until("value", tool_format.pair[1])

    def _pairs(self, before: str, after: str, schema: Mapping[str, Any]) -> str:
        """Arguments with these texts around their values."""
        definitions, required = schema.get("$defs") or {}, schema.get("required") or ()
        parts = []
        for name, described in (schema.get("properties") or {}).items():
            types = types_of(described, definitions)
            is_json = types and "string" not in types
            value = f"{_json({**described, '$defs': definitions}, {})} {self._literal(after)}" if is_json else "value"
            parts.append(f"({self._literal(before.replace('KEY', name))} {value}){'' if name in required else '?'}")
        begin, _, rest = before.partition("KEY")
        return " ".join(parts) or f"({self._literal(begin)} KEY {self._literal(rest)} value)*"

    def _until(self, rule: str, mark: str) -> str:
        """A rule of any text up to a mark, and the mark."""
        end = self._literal(mark)
        return f"{rule}: TEXT? {end}" if "<[" in end else f"{rule}[suffix={end}]: /(?s:.*)/"

    def _literal(self, text: str) -> str:
        """A text in Lark's syntax. Special tokens have no text there, but a number."""
        parts = []
        for token in self._text.encode(text):
            if self._tokens.is_special_token(token):
                plain, _, text = text.partition(self._text.piece(token))
                parts += [*([json.dumps(plain)] if plain else []), f"<[{token}]>"]
        return " ".join([*parts, json.dumps(text)] if text else parts)

    @functools.cached_property
    def _tokens(self) -> llguidance.LLTokenizer:
        """Raises ValueError for a tokenizer that is not one of Hugging Face's fast ones."""
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=sorted(self._text.eos_ids))


def _json(*schemas: Mapping[str, Any]) -> str:
    """The first of these schemas that can be enforced, as far as that goes, in Lark's syntax."""
    import llguidance

    for schema in schemas:
        lenient = {**schema, "x-guidance": {**_SPACES, "lenient": True}}
        if not llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(lenient)):
            break
    return f"%json {json.dumps(lenient)}"


def _whole_call(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = {"name": {"const": name}, "parameters": schema}
    closed = {"required": [*properties], "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed, "$defs": schema.get("$defs") or {}}


def _content(form: dict[str, Any]) -> dict[str, Any]:
    """The grammar of one form, for llguidance. ValueError if there is no such form."""
    import llguidance

    kinds = [kind for kind in form if form[kind] not in (None, False)]
    if len(kinds) != 1:
        raise ValueError(f"it has to be one form, and is {', '.join(kinds) or 'none'}")
    (kind,) = kinds
    value = form[kind]
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else json.loads(value) if isinstance(value, str) else value
        return {"json_schema": {**schema, "x-guidance": _SPACES}}
    if kind == "choice":
        return {"lark_grammar": "start: " + " | ".join(map(json.dumps, value))}
    if kind == "grammar":
        return {"lark_grammar": llguidance.grammar_from("grammar", value)}
    if kind == "regex":
        (grammar,) = json.loads(llguidance.LLMatcher.grammar_from_regex(value))["grammars"]
        return {"lark_grammar": grammar["lark_grammar"]}
    raise ValueError(f"'{kind}' is none that is known here: json_object, json, regex, choice, grammar")


def unpack(packed_BW: Tensor, vocabulary: int) -> Tensor:
    """[B, V] bool, of packed masks [B, W]: which tokens are allowed."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed_BW.device)
    allowed: Tensor = ((packed_BW[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocabulary]
    return allowed
