"""What this package registers."""
