"""What was recorded of a run, in forms that other tools read (docs/data.md)."""
