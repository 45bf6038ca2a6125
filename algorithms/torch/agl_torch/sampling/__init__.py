"""Sampling from a causal LM on one device: continuous batching, prefix reuse, exact log-probabilities."""

from agl_torch.sampling.sampler import Sampler
from agl_torch.sampling.types import Counters, Generated, Request, Response, SampledModel

__all__ = ["Counters", "Generated", "Request", "Response", "SampledModel", "Sampler"]
