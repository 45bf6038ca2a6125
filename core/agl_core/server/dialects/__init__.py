"""The model APIs that agents speak, one module each, and what they share."""
