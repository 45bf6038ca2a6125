"""Trackers of other makers, each behind an extra of agl-core."""
