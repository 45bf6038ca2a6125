"""Real use of what agl trains: sessions, feedback, versions behind a gate and a canary, and serving a policy."""
