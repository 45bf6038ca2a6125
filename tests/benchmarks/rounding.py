"""How far the log-probabilities of serving and of training are apart, for the certificate's tolerance.

    python -m tests.benchmarks.rounding --write    # minutes of one core; examples/smollm/policy too, if it is there

Responses are sampled token by token with keys and values kept, and computed again by one pass over whole sequences, on
a CPU. A wrong id is one that the policy could as well have drawn at a random place of a response.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from agl_chat.conversation import load_tokenizer
from agl_core.learning.certificate import TOLERANCES

from .tables import table, write

EXAMPLES = Path(__file__).parents[2] / "examples"
POLICIES = {"calc, 0.9M": "calc", "sql, 0.9M": "sql", "SmolLM2-135M": "smollm"}
PRECISIONS = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
"""Of serving and of training."""
PROMPTS, RESPONSES, TOKENS = 12, 16, 32
QUESTIONS = ("What is {} plus {}?", "How many of the {} books cost more than {} pounds?", "Tell me about {} and {}.")


@dataclass(frozen=True)
class Sampled:
    """The responses to one prompt; N responses of at most T tokens."""

    prompt_ids: Tensor
    """[P]"""
    ids_NT: Tensor
    logprobs_NT: Tensor
    mask_NT: Tensor
    """False after the end token."""

    @classmethod
    def of(cls, model: Any, prompt_ids: Tensor, end: int, random: torch.Generator) -> Sampled:
        ids, logprobs, read, kept = [], [], prompt_ids.repeat(RESPONSES, 1), None
        for _ in range(TOKENS):
            output = model(read, past_key_values=kept, use_cache=True)
            kept, logprobs_NV = output.past_key_values, output.logits[:, -1].float().log_softmax(-1)
            read = torch.multinomial(logprobs_NV.exp(), 1, generator=random)
            ids.append(read)
            logprobs.append(logprobs_NV.gather(1, read))
        ids_NT = torch.cat(ids, 1)
        ended_NT = (ids_NT == end).cumsum(1) - (ids_NT == end).int()
        return cls(prompt_ids, ids_NT, torch.cat(logprobs, 1), ended_NT == 0)

    def computed(self, model: Any, ids_NT: Tensor) -> Tensor:
        """[N, T, V] the log-probabilities at each place of these responses, by one pass over all."""
        whole = torch.cat([self.prompt_ids.repeat(RESPONSES, 1), ids_NT], 1)
        return model(whole).logits[:, len(self.prompt_ids) - 1 : -1].float().log_softmax(-1)

    def gaps(self, model: Any) -> Tensor:
        """[R] the difference of each token's two log-probabilities."""
        logprobs_NT = picked(self.computed(model, self.ids_NT), self.ids_NT)
        return (logprobs_NT - self.logprobs_NT).abs()[self.mask_NT]

    def with_a_wrong_id(self, model: Any, random: torch.Generator) -> Tensor:
        """[2, M] the difference at the wrong id of each response that has one, and the largest in all of it."""
        drawn_NTV = self.computed(model, self.ids_NT).exp()
        rows, places = torch.arange(RESPONSES), torch.multinomial(self.mask_NT.float(), 1, generator=random)[:, 0]
        drawn = torch.multinomial(drawn_NTV[rows, places], 1, generator=random)[:, 0]
        ids_NT = self.ids_NT.clone()
        ids_NT[rows, places] = drawn
        gaps_NT = (picked(self.computed(model, ids_NT), ids_NT) - self.logprobs_NT).abs() * self.mask_NT
        is_wrong = drawn != self.ids_NT[rows, places]
        return torch.stack([gaps_NT[rows, places], gaps_NT.amax(1)])[:, is_wrong]


def picked(logprobs_NTV: Tensor, ids_NT: Tensor) -> Tensor:
    return logprobs_NTV.gather(2, ids_NT[..., None])[..., 0]


@dataclass(frozen=True)
class Policy:
    """A model of an example in one precision, and what it samples."""

    folder: Path
    precision: str

    @cached_property
    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=getattr(torch, self.precision))

    @cached_property
    def responses(self) -> list[Sampled]:
        tokenizer: Any = load_tokenizer(str(self.folder))
        random = torch.Generator().manual_seed(0)
        ends = self.model.generation_config.eos_token_id
        questions = (QUESTIONS[i % len(QUESTIONS)].format(i + 11, 7 * i + 5) for i in range(PROMPTS))
        prompts = (
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
            for question in questions
        )
        end = ends[0] if isinstance(ends, list) else ends
        return [Sampled.of(self.model, torch.tensor(prompt), end, random) for prompt in prompts]


def rows() -> Iterator[str]:
    """A row for each policy and each pair of precisions."""
    for name, example in POLICIES.items():
        folder = EXAMPLES / example / "policy"
        policies = {precision: Policy(folder, precision) for precision in TOLERANCES}
        for served, trained in PRECISIONS if folder.exists() else ():
            responses, model = policies[served].responses, policies[trained].model
            tolerance, random = TOLERANCES[served], torch.Generator().manual_seed(1)
            gaps = torch.cat([sampled.gaps(model) for sampled in responses])
            wrong = torch.cat([sampled.with_a_wrong_id(model, random) for sampled in responses], 1)
            alone, whole = (wrong <= tolerance).float().mean(1).tolist()
            figures = [float(gaps.quantile(share)) for share in (0.5, 0.99, 0.999, 1.0)]
            beyond = float((gaps > tolerance).float().mean())
            yield " | ".join(
                [
                    name, f"{served}, {trained}", f"{len(gaps):,}", *(f"{figure:.1g}" for figure in figures),
                    f"{tolerance:g}", f"{beyond:.2%}", f"{alone:.0%}", f"{whole:.0%}",
                ]
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/exactness.md")
    torch.set_num_threads(1)
    with torch.no_grad():
        text = table(
            "policy | served, trained | tokens | difference: median | 99% | 99.9% | largest | tolerance | "
            "tokens beyond it | wrong ids within it | responses with a wrong id within it",
            rows(),
        )
    print(text)
    if parser.parse_args().write:
        write("exactness.md", "rounding.py", text)


if __name__ == "__main__":
    main()
