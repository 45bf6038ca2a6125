"""The numbers of runs over their steps: read, drawn, and where a step's time went."""
