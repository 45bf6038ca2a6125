"""From an agent file to a run's first files: `agl init`."""
