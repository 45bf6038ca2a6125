"""Ways of running an attempt: in the worker's process, in a process of its own, as a command."""
