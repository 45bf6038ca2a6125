"""The model APIs that agents speak: requests, replies and errors of each, and what was answered; no I/O."""
