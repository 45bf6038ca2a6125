"""OpenTelemetry spans, whatever vocabulary they were written in."""
