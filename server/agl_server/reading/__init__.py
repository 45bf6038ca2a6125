"""Reading a run: its rollouts, one of them explained, other rewards tried on it, export and import."""
