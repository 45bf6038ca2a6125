"""OpenTelemetry spans, in any vocabulary."""
