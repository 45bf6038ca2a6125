"""What reads a finished or running run."""
