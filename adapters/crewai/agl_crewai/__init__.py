"""agl's adapter for CrewAI."""
