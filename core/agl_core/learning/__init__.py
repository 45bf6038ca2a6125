"""Calls and tool results → transitions → rewards → credit → batch: pure functions, no I/O."""
