"""Attaching to agents without a change to their code."""
