"""Sampling from a causal LM on one device: continuous batching, prefix reuse, exact log-probabilities."""

from agl_torch.sampling.requests import Counters, Generated, Request, Response
from agl_torch.sampling.sampler import Sampler

__all__ = ["Counters", "Generated", "Request", "Response", "Sampler"]
