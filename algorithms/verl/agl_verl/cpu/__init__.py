"""What makes veRL and vLLM run without a GPU."""
