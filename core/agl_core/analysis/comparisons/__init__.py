"""Evaluations compared: two checkpoints on the same tasks, and repeated evaluations."""
