"""Engines in a process of their own: the run's side (`host`), the process's side (`child`), what crosses (`wire`)."""
