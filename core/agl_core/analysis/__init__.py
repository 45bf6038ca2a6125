"""What reads a finished or running run: typed records of what was found, which commands and others show."""
