"""Tasks of reasoning-gym, and its own verifiers as a reward rule."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from agl_core.decorators import endless_task_source
from agl_core.errors import ConfigError, PluginError, nearest
from agl_core.processes.sandbox import SANDBOX_SECONDS, IsolatedRule, SandboxLimitError, run_sandboxed
from agl_core.types import Episode, Task

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

_KEY = "reasoning_gym"
"""The key of a task's metadata with its dataset and index."""

_APART = 1 << 24
"""The distance of two datasets' seeds: task i of seed s is task i - 1 of seed s + 1."""
_HELD_OUT = 1000
"""Tasks of the split eval, whose seed is 0; [eval] tasks takes the first of them."""


@endless_task_source(name="reasoning_gym", held_out=_HELD_OUT)
def reasoning_gym_tasks(
    index: int,
    seed: int,
    *,
    dataset: Annotated[
        str,
        Field(
            min_length=1,
            description="The dataset's name in reasoning-gym, for instance 'chain_sum'. Several are a `mixture`.",
        ),
    ],
    split: Annotated[
        Literal["train", "eval"],
        Field(
            description="eval: tasks of a seed of its own, the same in every run. A dataset with few different tasks "
            "may repeat some of those of training."
        ),
    ] = "train",
    settings: Annotated[dict[str, Any], Field(description="Settings of the dataset, for instance min_terms = 2.")] = {},  # noqa: B006
) -> Task:
    """A hundred kinds of tasks with verifiers, made anew for each seed (needs `agl-rewards[reasoning-gym]`).

    The agent is called with the question. ConfigError if there is no such dataset, or it refuses its settings.
    """
    seed = _APART * (seed + 1) if split == "train" else 0
    described = {"dataset": dataset, "seed": seed, "size": _APART, "settings": settings}
    entry = _dataset(json.dumps(described, sort_keys=True))[index]
    metadata = {_KEY: {**described, "index": index}, "answer": str(entry["answer"])}
    return Task(f"{dataset}-{seed}-{index}", entry["question"], split, metadata)


class ReasoningGymRule(IsolatedRule):
    """The score of the agent's result by the dataset's own verifier, from 0 to 1; 0 without a result.

    Several verifiers hand the answer to `eval` or SymPy, so they run in a sandbox; an error or limit there scores 0.
    """

    async def __call__(self, episode: Episode, time_limit: float = SANDBOX_SECONDS) -> float:
        origin = episode.task.metadata.get(_KEY)
        if not isinstance(origin, dict):
            raise PluginError(
                "The reward rule 'reasoning_gym' scores the tasks of the task source 'reasoning_gym', and this task is "
                "of another: set [tasks.…] source = 'reasoning_gym', or choose another rule."
            )
        if episode.result is None:
            return 0.0
        dataset = json.dumps({name: value for name, value in origin.items() if name != "index"}, sort_keys=True)
        entry = _dataset(dataset)[origin["index"]]  # Here: some are others in a process with other hashes of texts.
        arguments = (dataset, entry, str(episode.result).strip())
        try:
            value = await run_sandboxed(_score, *arguments, prepare=(_dataset, dataset), seconds=time_limit)
        except SandboxLimitError:
            return 0.0
        return min(1.0, max(0.0, value)) if isinstance(value, float) else 0.0  # The answer may have written it.


def _score(described: str, entry: dict[str, Any], answer: str) -> float:
    dataset = _dataset(described)
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:
        return 0.0


@cache
def _dataset(described: str) -> ProceduralDataset:
    name, seed, size, settings = map(json.loads(described).get, ("dataset", "seed", "size", "settings"))
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The task source 'reasoning_gym' needs the package {error.name}, which is not installed: "
            f"pip install 'agl-rewards[reasoning-gym]'"
        ) from error
    if name not in DATASETS:
        raise ConfigError(f"reasoning-gym has no dataset '{name}'. {nearest(name, DATASETS)}")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym's '{name}' refuses its settings {settings}: {error}") from error
