"""The Ray cluster: joining it, watching it, and what is known to go wrong."""
