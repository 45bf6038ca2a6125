"""Teachers: models that score the tokens that a policy sampled, loaded here or served elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from agl_algorithms.policy_gradient import Teacher
from agl_algorithms.prepared import lineages
from agl_core.apis.errors import read_error
from agl_core.errors import EngineError
from agl_core.protocols import PolicySpec
from agl_core.types import Batch
from agl_torch.loading import Bases, LoadedModel

PROMPTS_PER_REQUEST = 8
REQUESTS_AT_ONCE = 8
TIMEOUT = httpx.Timeout(10.0, read=600.0)
"""Seconds; a server computes a request's prompts during the read."""
LARGEST_LOGPROB = 1e-3
"""Rounding may take the log-probability of a certain token above 0."""
PROBED_TOKENS = 256
"""Ids, from all over the vocabulary, whose texts are compared with a served teacher's."""


class ServedTeacher:
    """A model behind a server's `/completions`, asked for the log-probabilities of prompts of token ids.

    EngineError if it cannot be reached, gives none, or has other tokens than the policy's `tokenizer`.
    """

    def __init__(self, teacher: Teacher, tokenizer: Any) -> None:
        headers = {}
        if teacher.key_env is not None:
            if not os.environ.get(teacher.key_env):
                raise EngineError(f"teacher_key_env = '{teacher.key_env}': that environment variable is not set.")
            headers["Authorization"] = f"Bearer {os.environ[teacher.key_env]}"
        self._place, self._model = teacher.place, teacher.model
        transport = httpx.HTTPTransport(retries=2)
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT, transport=transport)
        self._check_tokens(tokenizer)

    def logprobs(self, batch: Batch, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        """[R] of the transitions `chosen`; 0 elsewhere. Calls that continue each other are one prompt.

        EngineError for transitions of another temperature than 1, which is the server's.
        """
        if (batch.temperature_N[chosen] != 1).any():
            raise self._error(
                "gives log-probabilities at temperature 1, and the policy sampled at another. Set [sampling] "
                "temperature = 1, or name the teacher's folder."
            )
        chains = lineages(batch, chosen)
        prompts = [batch.tokens_T[batch.offsets[row[-1]] : batch.offsets[row[-1] + 1]].tolist() for row in chains]
        requests = [prompts[i : i + PROMPTS_PER_REQUEST] for i in range(0, len(prompts), PROMPTS_PER_REQUEST)]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            scored = list(chain.from_iterable(pool.map(self._score, requests)))
        logprobs_R = np.zeros(int(batch.response_offsets[-1]))
        for row, tokens in zip(chains, scored, strict=True):
            for i in row.tolist():
                start, (first, end) = int(batch.prompt_lengths_N[i]), batch.response_offsets[i : i + 2]
                logprobs_R[first:end] = [token["logprob"] for token in tokens[start : start + end - first]]
        if not (highest := logprobs_R.max(initial=0.0)) <= LARGEST_LOGPROB:
            raise self._error(
                f"gives {highest:g} as the log-probability of a token, and none is above 0. Its weights or its server "
                f"compute wrongly: correct them, or name the teacher's folder."
            )
        return logprobs_R

    def _score(self, prompts: Sequence[Sequence[int]]) -> list[list[dict[str, Any]]]:
        """The server's entry for each token of each prompt; an empty one for the first token."""
        body = {"model": self._model, "prompt": prompts, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        try:
            reply = self._client.post(f"{self._place.rstrip('/')}/completions", json=body)
        except httpx.HTTPError as error:
            problem = f"does not answer ({type(error).__name__}: {error})"
            raise self._error(f"{problem}. Start its server, or correct the setting 'teacher'.") from error
        if not reply.is_success:
            message = read_error(reply.content).get("message") or reply.text[:200]
            raise self._error(
                f"refuses (status {reply.status_code}): {message}. Correct the settings 'teacher', 'teacher_model' or "
                f"'teacher_key_env', or the server's."
            )
        try:
            choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
            return [
                [{}, *(token[str(id)] for token, id in zip(of_one["prompt_logprobs"][1:], prompt[1:], strict=True))]
                for of_one, prompt in zip(choices, prompts, strict=True)
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise self._error(
                "gives no log-probabilities of a prompt's tokens. It needs a server that takes token ids as a prompt "
                "and `prompt_logprobs`, such as vLLM's."
            ) from error

    def _error(self, problem: str) -> EngineError:
        return EngineError(f"The teacher at {self._place} {problem}")

    def _check_tokens(self, tokenizer: Any) -> None:
        """Compare the texts of ids; incomplete characters have none of their own, and control tokens may differ."""
        added = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
        ids = [id for id in range(len(tokenizer)) if id not in added]
        spread = [ids[i] for i in np.unique(np.linspace(0, len(ids) - 1, PROBED_TOKENS).astype(int))]
        probed = [id for id in spread if "\ufffd" not in tokenizer.decode([id])]
        [tokens] = self._score([[probed[0], *probed]])
        for id, token in zip(probed, tokens[1:], strict=True):
            own, other = tokenizer.decode([id]), token.get("decoded_token")
            if other is not None and "\ufffd" not in other and own.strip() != other.strip():
                raise _other_tokens(self._place, f"id {id} is {other!r} for it and {own!r} for the policy")


def load_teacher(teacher: Teacher, spec: PolicySpec, policy: LoadedModel, bases: Bases) -> LoadedModel | ServedTeacher:
    """The teacher of a policy, frozen; EngineError if it has other tokens, or cannot be loaded or reached."""
    if teacher.model is not None:
        return ServedTeacher(teacher, policy.tokenizer)
    own = replace(spec, model=teacher.place, name=teacher.place, lora=None, adapter=None)
    loaded = bases.get(own, policy.device)
    known = loaded.tokenizer.get_vocab()
    for token, id in sorted(policy.tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if known.get(token) != id:
            there = f"id {known[token]}" if token in known else "unknown"
            raise _other_tokens(teacher.place, f"the token {token!r} is {there} for it and id {id} for the policy")
    return loaded


def _other_tokens(place: str, difference: str) -> EngineError:
    return EngineError(
        f"The teacher '{place}' has another tokenizer than the policy: {difference}. Distillation compares "
        f"probabilities of the same tokens: choose a teacher of the policy's family."
    )
