"""Sessions of real use: rollouts of tasks whose input is unknown."""
