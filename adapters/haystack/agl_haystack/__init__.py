"""agl's adapter for Haystack."""
