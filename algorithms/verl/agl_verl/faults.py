"""What went wrong, in words that help: the errors of veRL, Ray and vLLM that people meet, and what to do about each."""

from __future__ import annotations

from collections.abc import Collection, Mapping

REMEDIES: Mapping[tuple[str, ...], str] = {
    (
        "out of memory",
        "OutOfMemory",
        "No available memory for the cache blocks",
        "less than desired GPU memory utilization",
        "Cannot allocate memory",
    ): "The model does not fit: spread serving with engine.verl.tensor_parallel, lower engine.verl.serving_memory or "
    "tokens_per_micro_batch, set engine.verl.offload = true, or use more GPUs.",
    (
        "larger than the available KV cache memory",
        "KV cache is needed",
    ): "One reply of the longest context does not fit into the memory for keys and values: lower "
    "engine.verl.max_context, or raise serving_memory (on a CPU cache_mib).",
    (
        "max_model_len",
        "max_position_embeddings",
    ): "engine.verl.max_context is longer than the model's own context: lower it, or leave it out.",
    (
        "Unsupported CPU attention configuration",
    ): "vLLM on a CPU cannot compute this model's attention: its heads have to have 32, 64 or more dimensions.",
    (
        "tool_call_parser",
        "invalid tool call parser",
    ): "engine.verl.tool_parser names none of vLLM's parsers of tool calls.",
    (
        "Checkpoint engine nccl not registered",
    ): "Weights go to servers of their own (engine.verl.serving_gpus) over NCCL, for which veRL needs CuPy on every "
    "node: pip install cupy-cuda13x, or cupy-cuda12x with a torch for CUDA 12.",
    (
        "ActorDiedError",
        "ActorUnavailableError",
        "RayActorError",
        "NodeDiedError",
        "WorkerCrashedError",
        "EngineDeadError",
    ): "A process of the engine was lost: a vLLM server or a training worker died, or its node did. Memory that ran "
    "out is the usual reason (then lower engine.verl.tokens_per_micro_batch, serving_memory or cache_mib).",
}
"""Phrases of an error or of the log's end, and what they mean; the first that fits is told."""


def remedy_of(*texts: str) -> str | None:
    """What to do about an error with these texts (its own, and the end of the log), if it is known."""
    for text in texts:
        for phrases, remedy in REMEDIES.items():
            if any(phrase in text for phrase in phrases):
                return remedy
    return None


def lost(actors: Collection[str], nodes: Collection[str]) -> str:
    """What to tell of Ray's actors that are gone, and of nodes (by address) that are gone too.

    >>> print(lost(["server"], ["10.0.0.7"]))
    A node of the Ray cluster was lost (10.0.0.7), and what ran on it: server. Start Ray there again, or join another.
    """
    names = ", ".join(sorted(actors))
    if nodes:
        return (
            f"A node of the Ray cluster was lost ({', '.join(sorted(nodes))}), and what ran on it: {names}. Start Ray "
            f"there again, or join another."
        )
    return f"{remedy_of('ActorDiedError')} No longer there: {names}."


def first_line(error: BaseException) -> str:
    """An error in one line, with its class."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[-1].strip() if text else ''}"
