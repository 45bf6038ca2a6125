"""The rollout queue: leases, attempts and their life cycle."""
