"""What reads a finished or running run: typed records that commands print and others can show."""
