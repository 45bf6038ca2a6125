"""Other rewards or credit, tried on recorded rollouts."""
