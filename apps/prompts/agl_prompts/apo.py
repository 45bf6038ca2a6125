"""APO: automatic prompt optimisation by textual gradients and beam search (arXiv 2305.03495, algorithm 1 and 2).

Each round runs every candidate of the beam on one minibatch. The proposer says in words why the candidate's worst
rollouts earned little: the gradient. Then it edits the prompt against each reason. Of the edited candidates those with
the highest rewards on the same minibatch are run on all validation tasks, and the best of these and of the beam go on.
The paper chooses by bandits with single samples; here a minibatch chooses who is worth a validation.
"""

from __future__ import annotations

import math
import random
import re

from agl_core.types import Episode, episode_return
from agl_prompts.search import Candidate, Search, described

BEAM, REASONS, EDITS = 4, 3, 2
"""Candidates that go on; reasons for each of them; edits for each reason."""
_MAX_IDLE = 3
"""Rounds without a new rollout after which the search is over."""

_GRADIENT = """The prompt of an agent, between <prompt> and </prompt>, is to be improved.

<prompt>
{text}
</prompt>

With it, the agent did the following. A higher reward is better.

{examples}

Give {count} different reasons, in this prompt, why the rewards are not higher. Write each between <reason> and
</reason>.
"""
_EDIT = """The prompt of an agent, between <prompt> and </prompt>, is to be improved.

<prompt>
{text}
</prompt>

With it, the agent did the following.

{examples}

The prompt's fault is: {reason}

Write {count} different prompts, each complete, that do not have this fault. Write each between <prompt> and </prompt>.
"""


async def apo(search: Search) -> None:
    """Search until it is over: a SearchOverError has the reason."""
    chance = random.Random(search.config.seed)
    names, beam, round_ = list(search.seed), [search.seed], 0
    while True:
        await search.check_progress(_MAX_IDLE)
        name, round_ = names[round_ % len(names)], round_ + 1
        minibatch = chance.sample(search.feedback, search.minibatch)
        edited: dict[str, tuple[float, Candidate]] = {}
        for candidate in beam:
            episodes = await search.evaluate(candidate, minibatch)
            for text in await _edits(search, candidate[name], episodes):
                new = {**candidate, name: text}
                edited.setdefault(text, (await _reward(search, new, minibatch), new))
        best = sorted(edited.values(), key=lambda scored: scored[0], reverse=True)[:BEAM]
        for _, candidate in best:
            await search.evaluate(candidate, search.validation)
        known = [*beam, *(candidate for _, candidate in best if candidate not in beam)]
        beam = sorted(known, key=search.score, reverse=True)[:BEAM]


async def _edits(search: Search, text: str, episodes: list[Episode]) -> list[str]:
    """New texts of a prompt with which an agent had these episodes: a gradient in words, and a step against it."""
    examples = "\n\n".join("\n".join(f"{k}: {v}" for k, v in described(episode).items()) for episode in episodes)
    request = _GRADIENT.format(text=text, examples=examples, count=REASONS)
    texts: list[str] = []
    for reason in _between(await search.propose(request), "reason")[:REASONS]:
        request = _EDIT.format(text=text, examples=examples, reason=reason, count=EDITS)
        texts += _between(await search.propose(request), "prompt")[:EDITS]
    return texts


async def _reward(search: Search, candidate: Candidate, positions: list[int]) -> float:
    return math.fsum(episode_return(episode) for episode in await search.evaluate(candidate, positions))


def _between(reply: str, tag: str) -> list[str]:
    """The texts between the tags of a reply.

    >>> _between("<reason> too short </reason> and <reason>vague</reason>", "reason")
    ['too short', 'vague']
    """
    return [text.strip() for text in re.findall(f"<{tag}>(.*?)</{tag}>", reply, re.DOTALL) if text.strip()]
