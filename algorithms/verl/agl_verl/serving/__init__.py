"""vLLM's servers, whose replies are of one policy version."""
