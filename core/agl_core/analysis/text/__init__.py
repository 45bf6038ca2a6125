"""How what was recorded is shown: as words, as JSON, and the texts of tokens."""
