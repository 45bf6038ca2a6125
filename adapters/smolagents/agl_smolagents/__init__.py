"""agl's adapter for smolagents."""
