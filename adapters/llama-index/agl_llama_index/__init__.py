"""agl's adapter for LlamaIndex."""
