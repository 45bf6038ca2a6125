"""agl's adapter for DSPy."""
