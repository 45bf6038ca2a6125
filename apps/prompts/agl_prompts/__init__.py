"""Prompts instead of weights: an agent's prompts are improved by reflection on its rollouts."""
