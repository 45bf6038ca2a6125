"""veRL's single controller: an update, rows in and results out."""
